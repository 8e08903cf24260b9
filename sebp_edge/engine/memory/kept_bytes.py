"""Measures what autograd keeps of a decoder whose blocks are of no known kind, by running it on "meta".

The model has its own code, its true width, and no weights. Attention's scores, which grow with the square of the tokens
and which active rows do not keep, are left out.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.shape import HeadsShape, Kept, RuleShape
from sebp_edge.engine.sparse.hoist import ATTENTION
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps
from sebp_edge.engine.sparse.patches.packed_layers import PackedTexts, packed_forward, without_texts
from sebp_edge.engine.sparse.patches.restarts import packed_layers

# A multiple of the chunks of linear attention and of state spaces.
TOKENS = 256


def measure_kept(model: nn.Module, small: nn.Module, *, without_blocks: bool = False) -> tuple[Kept, list[Kept]]:
    """Returns what is kept outside of the blocks of a model on "meta", and in each block, unless these are left out.

    Changes the model. Raises errors of its code, if that reads numbers.

    Args:
        small: a small copy with the same parts, which shows what our kernels replace.
    """
    model.set_attn_implementation(ATTENTION)
    returns_tuple = without_blocks and _returns_tuple(small)
    for block in blocks_of(model) if without_blocks else ():
        block.forward = lambda hidden, *_args, **_kwargs: (hidden,) if returns_tuple else hidden
    stateful = packed_layers(model)
    has_state = [not {*stateful}.isdisjoint(block.modules()) for block in blocks_of(model)]
    meter = _Meter(model)
    by_run = meter.read_runs()
    meter.use_kernels(small)
    by_run_of_kernels = meter.read_runs()

    def kept(block: int | None) -> Kept:
        found = [tuple(each.get(block, 0) for each in runs) for runs in (by_run, by_run_of_kernels)]
        modules = [] if block is None else blocks_of(model)[block].modules()
        heads = next((HeadsShape(*meter.heads[layer]) for layer in modules if layer in meter.heads), None)
        return Kept(*found, block is not None and has_state[block], meter.rules.get(block), heads)

    return kept(None), [kept(block) for block in range(len(blocks_of(model)))]


@torch.no_grad()
def _returns_tuple(model: nn.Module) -> bool:
    """Whether blocks return their hidden states in a tuple."""
    found: list[bool] = []
    hook = blocks_of(model)[0].register_forward_hook(lambda _block, _inputs, out: found.append(isinstance(out, tuple)))
    with hook:
        model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    return found[0]


class _Meter:
    """Counts the bytes that a model's forward pass keeps, by block.

    Attributes:
        rules: the linear attention of blocks.
        heads: the number of heads of layers' attention, and the size of each.
    """

    def __init__(self, model: nn.Module):
        self._model, self._place, self._recomputes = model, None, False
        self.rules: dict[int, RuleShape] = {}
        self.heads: dict[nn.Module, tuple[int, int]] = {}
        # What our norms and gates compute, and whether a linear layer runs.
        self._computed, self._is_in_linear = _Storages(), False
        # So that all blocks alike pass a gradient on.
        model.get_input_embeddings().register_forward_hook(lambda _, _inputs, out: out.detach().requires_grad_())
        for number, block in enumerate(blocks_of(model)):
            self._count_in(block, number)
        for layer in packed_layers(model):
            layer.register_forward_pre_hook(lambda _, args, kwargs: (args, without_texts(kwargs)), with_kwargs=True)
            layer.forward = packed_forward(layer, lambda: self._texts, self._attend)

    def use_kernels(self, small: nn.Module) -> None:
        """Replaces what our kernels replace in the small copy."""
        for module, replacement in SmallOps(small).replacements_in(self._model, self._computed):
            module.forward = replacement
        for module in self._model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_: setattr(self, "_is_in_linear", True))
                module.register_forward_hook(lambda *_: setattr(self, "_is_in_linear", False))

    def _count_in(self, block: nn.Module, number: int) -> None:
        block.register_forward_pre_hook(lambda *_: setattr(self, "_place", number))
        block.register_forward_hook(lambda *_: setattr(self, "_place", None))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        self.rules[self._place] = RuleShape(value.shape[1], *key.shape[1:], value.shape[2])
        return _KeepsInputs.apply(query, key, value, *others[:2])

    def read_runs(self) -> list[dict[int | None, int]]:
        """Returns the bytes of each token by block: with an adapter in 2 and 4 bytes, then with all weights trained."""
        found = []
        for trains_all in (False, True):
            self._recomputes = not trains_all
            for dtype in (torch.bfloat16, torch.float32):
                self._model.to(dtype)
                for module in self._model.modules():
                    for parameter in module.parameters(recurse=False):
                        # An adapter keeps what its layer would.
                        parameter.requires_grad_(trains_all or isinstance(module, nn.Linear))
                short, long = self.read(TOKENS), self.read(2 * TOKENS)
                found.append({key: max(0, round((4 * short[key] - long[key]) / (2 * TOKENS))) for key in long})
        return found

    def read(self, tokens: int) -> Counter:
        """Returns the bytes of each block, and outside of blocks, for a text of so many tokens."""
        kept: dict[int, tuple[Tensor, int | None]] = {}
        own = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            if self._recomputes and self._is_in_linear and tensor in self._computed:
                return tensor
            kept.setdefault(tensor.untyped_storage()._cdata, (tensor, self._place))
            return tensor

        self._computed.clear()
        begins = torch.tensor([0, tokens], dtype=torch.int32)
        ids_1T = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        self._texts = PackedTexts(begins.to("meta"), tokens)
        packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), begins)
        packed |= dict.fromkeys(("max_length_q", "max_length_k"), tokens) | {"recorded_heads": self.heads}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._model.base_model(input_ids=ids_1T, position_ids=ids_1T, use_cache=False, **packed)
        sizes = Counter()
        for storage, (tensor, place) in kept.items():
            if storage not in own:
                sizes[place] += tensor.untyped_storage().nbytes()
        return sizes


class _Storages(dict):
    """Tensors by their storage, with what recomputes them, which adapters keep in their place."""

    def __setitem__(self, tensor: Tensor, source: object) -> None:
        super().__setitem__(tensor.untyped_storage()._cdata, tensor)

    def __contains__(self, tensor: Tensor) -> bool:
        return super().__contains__(tensor.untyped_storage()._cdata)


class _KeepsInputs(torch.autograd.Function):
    """Keeps what linear attention on packed texts does, and computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value, *others):
        ctx.save_for_backward(query, key, value, *others)
        return torch.empty_like(value, memory_format=torch.contiguous_format)
