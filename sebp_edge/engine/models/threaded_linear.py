"""Lets all threads share the product of one row with a weight on the CPU.

For one row in fp32, torch's linear layer uses one thread, which cannot read weights as fast as the memory delivers
them. A batched product of parts of the weight reads them with one thread each, without a copy of the weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Smaller weights are read sooner than threads are woken.
MIN_ELEMENTS = 2**16


@contextmanager
def threaded_linears(model: PreTrainedModel) -> Iterator[None]:
    """Context in which fp32 linear layers of `model` on the CPU compute single rows with all of torch's threads.

    Layers that something else has patched are left as they are.
    """
    patched = []
    if model.device.type == "cpu" and torch.get_num_threads() > 1:
        patched = [module for module in model.modules() if type(module) is nn.Linear and _pays(module)]
    try:
        for module in patched:
            module.forward = _forward(module)
        yield
    finally:
        for module in patched:
            vars(module).pop("forward", None)


def _pays(module: nn.Linear) -> bool:
    weight = module.weight
    is_plain = "forward" not in vars(module) and type(weight) is nn.Parameter and weight.is_contiguous()
    return is_plain and weight.dtype == torch.float32 and weight.numel() >= MIN_ELEMENTS


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    outputs, inputs = module.weight.shape
    parts = next(n for n in range(torch.get_num_threads(), 0, -1) if outputs % n == 0)
    weight, bias, plain = module.weight.detach().view(parts, -1, inputs).mT, module.bias, module.forward

    def forward(x: Tensor) -> Tensor:
        if x.numel() != inputs:
            return plain(x)
        out = torch.bmm(x.reshape(1, 1, inputs).expand(parts, 1, inputs), weight).view(*x.shape[:-1], outputs)
        return out if bias is None else out + bias

    return forward
