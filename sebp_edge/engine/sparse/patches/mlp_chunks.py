"""Runs MLPs on one chunk of rows at a time, and recomputes each chunk in the backward pass.

An MLP's hidden activations are the widest of a block, and each row's depend on that row alone. So they exist for one
chunk at a time; only the input of the other chunks is kept. Each chunk is a separate checkpoint (Chen et al. 2016),
whether or not its block is in a checkpoint too. Such a block is recomputed only until it has all that it keeps: in most
models that ends with the last chunk's input, before the MLP is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.checkpoints import dropouts_of, refuse_dropout
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of


class ChunkedMlps(Patch):
    """Handle of one decoder's MLPs in chunks of at most so many rows; None leaves them whole."""

    def __init__(self, decoder: nn.Module, chunk_rows: int | None):
        super().__init__()
        self.chunk_rows = chunk_rows
        mlps = [getattr(block, "mlp", None) for block in blocks_of(decoder)]
        self._mlps = [] if chunk_rows is None else [mlp for mlp in mlps if isinstance(mlp, nn.Module)]
        self.is_recomputing_block = False

    def attach(self, recomputing: Callable[[], AbstractContextManager]) -> None:
        """Splits the MLPs' rows into chunks; `recomputing` returns the context in which a chunk is recomputed."""
        self.recomputing = recomputing
        for mlp in self._mlps:
            self._replace(mlp, _ChunkedForward(self, mlp))

    @contextmanager
    def recomputing_block(self) -> Iterator[None]:
        """Context in which a block is recomputed, only for what it keeps."""
        self.is_recomputing_block = True
        try:
            yield
        finally:
            self.is_recomputing_block = False


class _ChunkedForward:
    """Replacement of one MLP's `forward`."""

    def __init__(self, chunked_mlps: ChunkedMlps, mlp: nn.Module):
        self._chunked_mlps, self._forward = chunked_mlps, forward_of(mlp)
        self._dropouts = dropouts_of(mlp)
        self._gave_gradient = False

    def __call__(self, x: Tensor) -> Tensor:
        chunks = x.split(self._chunked_mlps.chunk_rows, dim=-2)
        if not torch.is_grad_enabled():
            return _joined(list(map(self._forward, chunks)))
        refuse_dropout(self._dropouts)
        if not self._chunked_mlps.is_recomputing_block:
            out = _joined([self._in_checkpoint(self._forward, chunk) for chunk in chunks])
            self._gave_gradient = out.requires_grad
            return out
        for chunk in chunks:
            # Only the kept input counts, not the output; the last chunk's input may end the recomputation.
            self._in_checkpoint(torch.empty_like, chunk)
        # Reached only if an operation after the MLP keeps something, which depends on the MLP's output.
        with torch.no_grad():
            out = _joined(list(map(self._forward, chunks)))
        return out.requires_grad_(self._gave_gradient)

    def _in_checkpoint(self, forward: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor:
        contexts = {"context_fn": lambda: (nullcontext(), self._chunked_mlps.recomputing())}
        return checkpoint(forward, chunk, use_reentrant=False, preserve_rng_state=False, **contexts)


def _joined(chunks: list[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-2)
