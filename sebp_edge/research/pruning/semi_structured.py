"""Inference with 2:4 weights by torch's semi-structured kernels, which read 9/16 of a bf16 weight and skip its zeros.

    with semi_structured(model):
        model.generate(...)

They pay for many rows at a time, such as a long prompt's (guide/nm-paper.md, "Compressed products").
"""

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from sebp_edge.engine.sparse.patches.patch import Patch
from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import release_memory

# What torch requires: a layer's outputs and inputs are multiples of this.
_MULTIPLE = 16
_FIRST_CAPABILITY = (8, 0)


def semi_structured(model: nn.Module) -> "SemiStructured":
    """Compresses the weights of a model's 2:4 linear layers in memory, for inference only.

    Layers that are not 2:4 stay as they are.

    Returns:
        A handle: a context manager, or call `remove()` when done. Then the weights are dense, with the values before.

    Raises:
        SparsityError: the model is not in bf16 or fp16 on a GPU with sparse kernels, or has no 2:4 layers.
    """
    return SemiStructured(model)


class SemiStructured(Patch):
    """Handle of one model whose 2:4 weights are compressed in memory.

    Attributes:
        layers: the names of the compressed layers.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        found = _layers_2_4(model)
        _refuse_without_kernels(found)
        self.layers = tuple(found)
        # The layers that share each weight.
        shared: dict[nn.Parameter, list[nn.Linear]] = {}
        for layer in found.values():
            shared.setdefault(layer.weight, []).append(layer)
        with self._attaching():
            for weight, layers in shared.items():
                compressed = _compressed(weight)
                for layer in layers:
                    self._replace(layer, partial(_product, compressed, layer))
                self._undo.append(partial(_decompress, weight, compressed))
                weight.data = weight.new_empty(0)
        release_memory(next(iter(shared)).device)


def is_2_4(weight: Tensor) -> bool:
    """Whether of each 4 neighbouring inputs, at most 2 weights of an output are not zero."""
    return weight.shape[1] % 4 == 0 and bool(((weight.detach() != 0).view(-1, 4).sum(1) <= 2).all())


def _layers_2_4(model: nn.Module) -> dict[str, nn.Linear]:
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.is_floating_point()
        and not any(size % _MULTIPLE for size in layer.weight.shape)
        and is_2_4(layer.weight)
    }
    if not found:
        raise SparsityError(
            "The model has no 2:4 linear layers, which sparse kernels need; train all weights with the pattern 2:4 "
            'first ("N:M sparsity" in sebp_edge/guide/for-researchers.md).'
        )
    return found


def _refuse_without_kernels(layers: dict[str, nn.Linear]) -> None:
    weight = next(iter(layers.values())).weight
    if weight.dtype not in (torch.bfloat16, torch.float16):
        problem = f"its weights are in {str(weight.dtype).removeprefix('torch.')}, not in bf16 or fp16"
    elif weight.device.type != "cuda":
        problem = f"the model is on {weight.device.type!r}, not on a CUDA GPU"
    elif torch.version.hip or torch.cuda.get_device_capability(weight.device) < _FIRST_CAPABILITY:
        problem = f"{torch.cuda.get_device_name(weight.device)} is no GPU of NVIDIA's Ampere generation or later"
    elif not torch.backends.cusparselt.is_available():
        problem = "torch was built without cuSPARSELt"
    else:
        return
    raise SparsityError(f"There are no sparse kernels for this model: {problem}; compute with dense weights.")


def _compressed(weight: nn.Parameter) -> Tensor:
    with warnings.catch_warnings():
        # torch calls the interface a prototype.
        warnings.simplefilter("ignore", UserWarning)
        return to_sparse_semi_structured(weight.detach().contiguous())


@torch.no_grad()
def _decompress(weight: nn.Parameter, compressed: Tensor) -> None:
    weight.data = compressed.to_dense()


def _product(compressed: Tensor, layer: nn.Linear, x: Tensor) -> Tensor:
    # torch has sparse products of matrices only.
    return F.linear(x.reshape(-1, x.shape[-1]), compressed, layer.bias).view(*x.shape[:-1], -1)
