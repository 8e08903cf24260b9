"""MLPs that run on a piece of the rows at a time, recomputed piece by piece in the backward pass.

An MLP's hidden activations are the widest of a block, and each row's depend on that row alone. So they exist for one
piece at a time; of the other pieces only the input is kept. Each piece is a checkpoint (Chen et al. 2016) of its own,
whether or not its block is in a checkpoint too. Such a block is recomputed only until it has all that it keeps: in most
models that ends with the last piece's input, before anything of the MLP is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sebp_edge.models.architecture import blocks_of
from sebp_edge.models.shape import Block
from sebp_edge.patches.checkpoints import dropouts_of, refuse_dropout
from sebp_edge.patches.execution import Execution
from sebp_edge.patches.norms_and_mlps import remakes_norms
from sebp_edge.patches.patch import Patch

# Rows of a piece. With these, an MLP of a 3B model needs no more memory than attention's backward pass over 3,000
# tokens. Half as many would dequantise a 4-bit base twice as often.
ROWS = 1024


class MlpPieces(Patch):
    """Handle of one decoder's MLPs in pieces.

    Args:
        rows: most rows of a piece; None leaves MLPs whole.

    Attributes:
        only_keeps: whether a block is being recomputed, only for what it keeps.
    """

    def __init__(self, decoder: nn.Module, rows: int | None):
        super().__init__()
        self.rows = rows
        mlps = [getattr(block, "mlp", None) for block in blocks_of(decoder)]
        self._mlps = [] if rows is None else [mlp for mlp in mlps if isinstance(mlp, nn.Module)]
        self.only_keeps = False

    def attach(self, again: Callable[[], AbstractContextManager]) -> None:
        """Runs MLPs in pieces from now on; `again` gives the context in which a piece is recomputed."""
        for mlp in self._mlps:
            self._replace(mlp, _InPieces(self, mlp, again))

    @contextmanager
    def only_for_what_is_kept(self) -> Iterator[None]:
        """Context in which a block is recomputed, only for what it keeps."""
        self.only_keeps = True
        try:
            yield
        finally:
            self.only_keeps = False


class _InPieces:
    """Replacement of one MLP's `forward`."""

    def __init__(self, pieces: MlpPieces, mlp: nn.Module, again: Callable[[], AbstractContextManager]):
        self._pieces, self._forward, self._again = pieces, mlp.forward, again
        self._dropouts = dropouts_of(mlp)
        self._gave_gradient = False

    def __call__(self, x: Tensor) -> Tensor:
        pieces = x.split(self._pieces.rows, dim=-2)
        if not torch.is_grad_enabled():
            return _joined(list(map(self._forward, pieces)))
        refuse_dropout(self._dropouts)
        if not self._pieces.only_keeps:
            out = _joined([self._in_checkpoint(self._forward, piece) for piece in pieces])
            self._gave_gradient = out.requires_grad
            return out
        for piece in pieces:
            # Only the kept input counts, not the output; the last piece's input may end the recomputation.
            self._in_checkpoint(torch.empty_like, piece)
        # Reached only if an operation after the MLP keeps something, which depends on the MLP's output.
        with torch.no_grad():
            out = _joined(list(map(self._forward, pieces)))
        return out.requires_grad_(self._gave_gradient)

    def _in_checkpoint(self, forward: Callable[[Tensor], Tensor], piece: Tensor) -> Tensor:
        contexts = {"context_fn": lambda: (nullcontext(), self._again())}
        return checkpoint(forward, piece, use_reentrant=False, preserve_rng_state=False, **contexts)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


# --------------------------------------------------------------------------------------------------------------- memory


def rows_of_a_piece(tokens: int) -> int:
    """How many rows of a batch of `tokens` go through an MLP at once."""
    return min(tokens, ROWS)


def kept_by_pieces(block: Block, run: Execution) -> int:
    """Bytes per token that autograd keeps of an MLP in pieces: its input, unless a norm's output is kept anyway."""
    return run.itemsize * block.hidden if remakes_norms(block.kind, run) and block.kind.norm_outputs else 0


def backward_of_pieces(block: Block, tokens: int, of_row: int, run: Execution) -> int:
    """Bytes that an MLP in pieces holds in its backward pass: one piece, and the gradients that all pieces add to.

    The latter are the gradient of its input and, if all weights are trained, those of its weights, one of which exists
    twice while it is summed.

    Args:
        tokens: rows of the batch.
        of_row: bytes per row of the piece.
    """
    of_weights = 4 * block.mlp_out.size if run.trains_all else 0
    return rows_of_a_piece(tokens) * of_row + run.itemsize * (tokens * 3 * block.hidden + of_weights)


def parameters_run_again_in_pieces(block: Block) -> int:
    """Parameters whose products the backward pass of an MLP in pieces recomputes: all but the last layer's."""
    return sum(linear.size for linear in block.mlp_in)
