"""Runs a decoder's RMSNorms and gated MLPs on our own operations, on devices for which these have kernels.

A trial of one module of each kind, not the class, decides which are replaced: what is not exactly such a norm or MLP
keeps its own forward. Outputs are cheap to recompute from what the backward passes keep anyway, so the layers that read
them need not keep them; see `SmallOps.source_of`.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sebp_edge.engine.sparse.patches.agreement import find_mismatch
from sebp_edge.engine.sparse.patches.patch import Patch, has_own_forward, kind_of
from sebp_edge.ops import ACTIVATIONS, GatedInputs, Recompute, gated, rms_norm, runs_kernels

# All parts of Llama's MLP.
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class SmallOps(Patch):
    """Handle of one decoder's replaced norms and MLPs."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self._decoder = decoder
        self._sources = WeakTensorKeyDictionary()
        self.replaced: list[nn.Module] = []

    def attach(self) -> None:
        """Replaces the modules that pass a trial, if our operations have kernels for the device."""
        # In plain PyTorch ours are no faster than the modules' own, and recomputing inputs takes a little time.
        if runs_kernels(self._decoder.get_input_embeddings().weight):
            self._undo.append(self.replaced.clear)
            for module, replacement in self.replacements():
                self._replace(module, replacement)
                self.replaced.append(module)

    def replacements(self) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Yields the modules whose kind passes a trial, each with a function that computes the same."""
        chosen: dict[tuple, int | None] = {}
        for module in list(self._decoder.modules()):
            # A forward that was already replaced stays as it is.
            candidates = self._candidates(module) if has_own_forward(module) else []
            if not candidates:
                continue
            if (kind := tuple(map(kind_of, (module, *module.children())))) not in chosen:
                chosen[kind] = self._first_alike(module, candidates)
            if chosen[kind] is not None:
                yield module, candidates[chosen[kind]]

    def replacements_in(self, twin: nn.Module, sources: MutableMapping) -> Iterator[tuple[nn.Module, Callable]]:
        """Yields the same for the modules of these names and classes of a decoder that cannot be tried.

        Args:
            sources: gets what recomputes their outputs.
        """
        names, twins = {module: name for name, module in self._decoder.named_modules()}, dict(twin.named_modules())
        for module, replacement in self.replacements():
            replacement = copy.copy(replacement)
            replacement.module, replacement.sources = twins.get(names[module]), sources
            if type(replacement.module) is type(module):
                yield replacement.module, replacement

    def source_of(self, x: Tensor) -> Recompute | GatedInputs | None:
        """Returns what recomputes `x` in the backward pass; None unless a replaced norm or gate computed it."""
        return self._sources.get(x)

    def _candidates(self, module: nn.Module) -> list[Callable[[Tensor], Tensor]]:
        """Returns functions of which one may compute the same as the module."""
        if _looks_like_a_norm(module):
            if _takes_a_gate(module):
                return [_GatedNorm(module, comes_first) for comes_first in (True, False)]
            return [_Norm(module, offset, self._sources) for offset in (0.0, 1.0)]
        if _looks_like_an_mlp(module):
            return [_Mlp(module, name, self._sources) for name in ACTIVATIONS if _is_activation(module, name)]
        return []

    def _first_alike(self, module: nn.Module, candidates: list[Callable[[Tensor], Tensor]]) -> int | None:
        """Returns the place of the first function that computes the same as the module; None if none does."""
        own, weight = module.forward, self._decoder.get_input_embeddings().weight
        if _looks_like_a_norm(module):
            trial = [_trial_input(module.weight.numel(), module.weight.device, module.weight.dtype)]
            trial += [trial[0].flip(1)] * _takes_a_gate(module)
        else:
            trial = [_trial_input(weight.shape[1], weight.device, weight.dtype)]
        same = (
            place
            for place, one in enumerate(candidates)
            if find_mismatch(module, lambda: own(*trial), lambda one=one: one(*trial)) is None
        )
        return next(same, None)


def _trial_input(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random rows [3, size]; one is so small that the norm's eps changes its output."""
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [30.0], [1e-3]])
    return rows.to(device, dtype)


def _looks_like_a_norm(module: nn.Module) -> bool:
    state = [*module.named_parameters(), *module.named_buffers()]
    only_weight = len(state) == 1 and state[0][0] == "weight" and state[0][1].dim() == 1
    return only_weight and isinstance(_eps(module), float)


def _takes_a_gate(norm: nn.Module) -> bool:
    return list(inspect.signature(type(norm).forward).parameters)[2:] == ["gate"]


def _eps(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _looks_like_an_mlp(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    own_state = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return parts.keys() == MLP_PARTS and not own_state and not list(parts["act_fn"].parameters())


def _is_activation(mlp: nn.Module, name: str) -> bool:
    # In fp64, which tells GELU from its tanh approximation.
    values = torch.linspace(-6, 6, 49, dtype=torch.float64)
    with torch.no_grad():
        return torch.allclose(gated(values, torch.ones_like(values), name), mlp.act_fn(values), rtol=1e-6, atol=1e-9)


class _Norm:
    """Replacement of one RMSNorm's `forward`."""

    def __init__(self, module: nn.Module, offset: float, sources: WeakTensorKeyDictionary):
        self.module, self.eps, self.offset, self.sources = module, _eps(module), offset, sources

    def __call__(self, x: Tensor) -> Tensor:
        weight, eps, offset = self.module.weight, self.eps, self.offset
        # Each class promotes inputs of another dtype in its own way.
        if x.dtype != weight.dtype:
            return type(self.module).forward(self.module, x)
        out = rms_norm(x, weight, eps, offset)
        if out.requires_grad:
            tensors = x.detach(), weight.detach()
            self.sources[out] = Recompute(lambda x, weight: rms_norm(x, weight, eps, offset), tensors)
        return out


class _GatedNorm:
    """Replacement of the `forward` of an RMSNorm whose outputs, or inputs, are multiplied by SiLU of a gate."""

    def __init__(self, module: nn.Module, comes_first: bool):
        self.module, self.eps, self.comes_first = module, _eps(module), comes_first

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = self.module.weight
        if gate is None or not x.dtype == gate.dtype == weight.dtype:
            return type(self.module).forward(self.module, x, gate)
        if self.comes_first:
            return gated(gate, rms_norm(x, weight, self.eps, 0.0), "silu")
        return rms_norm(gated(gate, x, "silu"), weight, self.eps, 0.0)


class _Mlp:
    """Replacement of one MLP's `forward`."""

    def __init__(self, module: nn.Module, activation: str, sources: WeakTensorKeyDictionary):
        self.module, self.activation, self.sources = module, activation, sources

    def __call__(self, x: Tensor) -> Tensor:
        gate, up, activation = self.module.gate_proj(x), self.module.up_proj(x), self.activation
        hidden = gated(gate, up, activation)
        if hidden.requires_grad:
            self.sources[hidden] = GatedInputs(gate, up, activation)
        return self.module.down_proj(hidden)
