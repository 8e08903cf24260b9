"""Tells whether a model still computes what it computed before: the same modules, weights, adapter and settings."""

import weakref

import torch
from torch import Tensor, nn

# Of each weight, so many elements are compared by value: kernels and `.data` change weights without a trace.
SAMPLED = 64
PLAIN = (bool, int, float, str, list, dict)


class ModelState:
    """What a model was at one moment. Equal to another one if nothing changed between them, as far as a sample shows.

    Refers to modules and weights weakly, so that a freed one whose address is used again is not taken for it.
    """

    def __init__(self, model: nn.Module):
        weights = [*model.parameters(), *model.buffers()]
        self._identity = [(weakref.ref(each), each.data_ptr(), _version(each)) for each in weights if _is_plain(each)]
        self._identity += [(weakref.ref(each), 0, _settings(each)) for each in model.modules()]
        samples = [_sample(each) for each in weights if _is_plain(each)]
        self._sample = torch.cat(samples) if samples else torch.empty(0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState) or len(self._identity) != len(other._identity):
            return False
        pairs = zip(self._identity, other._identity, strict=True)
        # A dead reference is equal to itself only.
        same = all(one[0]() is not None and one[0]() is two[0]() and one[1:] == two[1:] for one, two in pairs)
        return same and self._sample.device == other._sample.device and torch.equal(self._sample, other._sample)

    __hash__ = None


def _is_plain(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided


def _version(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].float()


def _settings(module: nn.Module) -> tuple:
    """Returns a module's forward and hooks, if they were replaced or added, and its settings: PEFT's, for example."""
    own = vars(module)
    plain = {name: repr(value) for name, value in own.items() if isinstance(value, PLAIN) and name not in _TENSORS}
    hooks = tuple(map(id, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))
    return id(own.get("forward")), hooks, plain


# What nn.Module keeps in dictionaries: tensors, modules and hooks.
_TENSORS = frozenset(vars(nn.Module())) - {"training"}
