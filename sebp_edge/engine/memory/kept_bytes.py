"""Measures what autograd keeps of a decoder whose blocks are of no known kind, by running it on "meta".

The model has its own code, its true width, and no weights. Attention's scores, which grow with the square of the tokens
and which active rows do not keep, are left out.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.shape import Kept
from sebp_edge.engine.sparse.hoist import ATTENTION
from sebp_edge.engine.sparse.patches.restarts import OF_PACKED_ROWS, layers_with_state

# A multiple of the chunks of linear attention and of state spaces.
TOKENS = 256


def measure_kept(model: nn.Module, *, without_blocks: bool = False) -> tuple[Kept, list[Kept]]:
    """Returns what is kept outside of the blocks of a model on "meta", and in each block, unless these are left out.

    Changes the model. Raises errors of its code, if that reads numbers.
    """
    model.set_attn_implementation(ATTENTION)
    meter, found = _Meter(model), []
    for block in blocks_of(model) if without_blocks else ():
        block.forward = lambda hidden, *_args, **_kwargs: hidden
    for trains_all in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            model.to(dtype)
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    # An adapter keeps what its layer would.
                    parameter.requires_grad_(trains_all or isinstance(module, nn.Linear))
            short, long = meter.read(TOKENS), meter.read(2 * TOKENS)
            found.append({key: max(0, round((4 * short[key] - long[key]) / (2 * TOKENS))) for key in long})
    of_one_row = meter.read(1)

    def kept(block: int | None) -> Kept:
        by_run = tuple((each.get((block, False), 0), each.get((block, True), 0)) for each in found)
        # A text of one row keeps as much as one of a chunk, or nearly: some of it is not in chunks.
        num_rows = round(of_one_row[block, True] / by_run[-1][1]) if by_run[-1][1] else 1
        return Kept(by_run, 1 << max(0, num_rows - 1).bit_length())

    return kept(None), [kept(block) for block in range(len(blocks_of(model)))]


class _Meter:
    """Counts the bytes that a model's forward pass keeps, by block, and by whether texts are padded there."""

    def __init__(self, model: nn.Module):
        self._model, self._place = model, (None, False)
        # So that all blocks alike pass a gradient on.
        model.get_input_embeddings().register_forward_hook(lambda _, _inputs, out: out.detach().requires_grad_())
        for number, block in enumerate(blocks_of(model)):
            self._count_in(block, (number, False))
            for layer in layers_with_state(block):
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, {name: kwargs[name] for name in kwargs.keys() - OF_PACKED_ROWS}),
                    with_kwargs=True,
                )
                self._count_in(layer, (number, True))
                # Projections of its input, and of its output, run on active rows.
                for child in layer.children():
                    if isinstance(child, nn.Linear):
                        self._count_in(child, (number, False))

    def _count_in(self, module: nn.Module, place: tuple[int, bool]) -> None:
        before: list[tuple] = []

        def enter(_module, _inputs) -> None:
            before.append(self._place)
            self._place = place

        def leave(_module, _inputs, _output) -> None:
            self._place = before.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def read(self, tokens: int) -> Counter:
        """Returns the bytes of each place for a text of so many tokens."""
        kept: dict[int, tuple[Tensor, tuple]] = {}
        own = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage()._cdata, (tensor, self._place))
            return tensor

        begins = torch.tensor([0, tokens], dtype=torch.int32)
        ids_1T = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), begins)
        packed |= dict.fromkeys(("max_length_q", "max_length_k"), tokens)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._model.base_model(input_ids=ids_1T, position_ids=ids_1T, use_cache=False, **packed)
        sizes = Counter()
        for storage, (tensor, place) in kept.items():
            if storage not in own:
                sizes[place] += tensor.untyped_storage().nbytes()
        return sizes
