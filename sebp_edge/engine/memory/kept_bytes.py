"""Measures what autograd keeps of a decoder whose blocks are of no known kind, by running it on "meta".

The model has its own code, its true width, and no weights. Attention's scores, which grow with the square of the tokens
and which active rows do not keep, are left out.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.shape import Kept, PackedRule
from sebp_edge.engine.sparse.hoist import ATTENTION
from sebp_edge.engine.sparse.patches.packed_layers import PackedTexts, packed_forward, runs_packed, without_texts
from sebp_edge.engine.sparse.patches.restarts import layers_with_state

# A multiple of the chunks of linear attention and of state spaces.
TOKENS = 256


def measure_kept(model: nn.Module, *, without_blocks: bool = False) -> tuple[Kept, list[Kept]]:
    """Returns what is kept outside of the blocks of a model on "meta", and in each block, unless these are left out.

    Changes the model. Raises errors of its code, if that reads numbers.
    """
    model.set_attn_implementation(ATTENTION)
    for block in blocks_of(model) if without_blocks else ():
        block.forward = lambda hidden, *_args, **_kwargs: hidden
    has_state = [any(layers_with_state(block)) for block in blocks_of(model)]
    padded = _Meter(model, packs_rules=False)
    of_padded, of_one_row = _bytes_by_run(padded), padded.read(1)
    packed = _Meter(model, packs_rules=True)
    packed.read(1)
    of_packed = _bytes_by_run(packed) if packed.rules else []

    def kept(block: int | None) -> Kept:
        by_run = tuple((each.get((block, False), 0), each.get((block, True), 0)) for each in of_padded)
        # A text of one row keeps as much as one of a chunk, or nearly: some of it is not in chunks.
        num_rows = round(of_one_row[block, True] / by_run[-1][1]) if by_run[-1][1] else 1
        rule = None
        if block in packed.rules:
            rule = PackedRule(tuple(each[block, False] for each in of_packed), *packed.rules[block])
        return Kept(by_run, 1 << max(0, num_rows - 1).bit_length(), block is not None and has_state[block], rule)

    return kept(None), [kept(block) for block in range(len(blocks_of(model)))]


def _bytes_by_run(meter: "_Meter") -> list[dict[tuple[int | None, bool], int]]:
    """Returns the bytes of each token by place: with an adapter in 2 and 4 bytes, then with all weights trained."""
    found = []
    for trains_all in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            meter.model.to(dtype)
            for module in meter.model.modules():
                for parameter in module.parameters(recurse=False):
                    # An adapter keeps what its layer would.
                    parameter.requires_grad_(trains_all or isinstance(module, nn.Linear))
            short, long = meter.read(TOKENS), meter.read(2 * TOKENS)
            found.append({key: max(0, round((4 * short[key] - long[key]) / (2 * TOKENS))) for key in long})
    return found


class _Meter:
    """Counts the bytes that a model's forward pass keeps, by block, and by whether texts are padded there.

    Attributes:
        rules: of each block with linear attention on packed texts, the number of heads, and the sizes of keys and
            values.
    """

    def __init__(self, model: nn.Module, *, packs_rules: bool):
        self.model, self._place = model, (None, False)
        self.rules: dict[int, tuple[int, int, int]] = {}
        # So that all blocks alike pass a gradient on.
        model.get_input_embeddings().register_forward_hook(lambda _, _inputs, out: out.detach().requires_grad_())
        for number, block in enumerate(blocks_of(model)):
            self._count_in(block, (number, False))
            for layer in layers_with_state(block):
                layer.register_forward_pre_hook(lambda _, args, kwargs: (args, without_texts(kwargs)), with_kwargs=True)
                if runs_packed(layer, packs_rules):
                    layer.forward = packed_forward(layer, lambda: self._texts, self._attend)
                    continue
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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        self.rules[self._place[0]] = (*value.shape[1:2], *key.shape[2:], *value.shape[2:])
        return _KeepsInputs.apply(query, key, value, *others[:2])

    def read(self, tokens: int) -> Counter:
        """Returns the bytes of each place for a text of so many tokens."""
        kept: dict[int, tuple[Tensor, tuple]] = {}
        own = {parameter.untyped_storage()._cdata for parameter in self.model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage()._cdata, (tensor, self._place))
            return tensor

        begins = torch.tensor([0, tokens], dtype=torch.int32)
        ids_1T = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        self._texts = PackedTexts.of(begins.to("meta"), tokens)
        packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), begins)
        packed |= dict.fromkeys(("max_length_q", "max_length_k"), tokens)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.model.base_model(input_ids=ids_1T, position_ids=ids_1T, use_cache=False, **packed)
        sizes = Counter()
        for storage, (tensor, place) in kept.items():
            if storage not in own:
                sizes[place] += tensor.untyped_storage().nbytes()
        return sizes


class _KeepsInputs(torch.autograd.Function):
    """Keeps what linear attention on packed texts does, and computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value, *others):
        ctx.save_for_backward(query, key, value, *others)
        return torch.empty_like(value, memory_format=torch.contiguous_format)
