"""Finds how the weights of a model are spread over processes; refuses what the sparse backward pass does not support.

FSDP2 (`fully_shard`) gathers a module's weights by hooks on calls of the module: before its forward pass, and again
before its backward pass, into the same storage. So a weight may be read only within a call of its module, and a
Function may keep it for its backward pass. In between, the weight is a DTensor, which has this process's part.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
else:
    FSDPModule = DTensor = ()

FSDP_1 = (
    "The model is in FullyShardedDataParallel (FSDP1), which sparsify does not support; use fully_shard (FSDP2, "
    "accelerate's `fsdp_version: 2`) or DistributedDataParallel."
)
ZERO_3 = (
    "DeepSpeed's ZeRO-3 splits the model's weights, which sparsify does not support; use ZeRO-2, fully_shard (FSDP2) "
    "or DistributedDataParallel."
)
TENSOR_PARALLEL = (
    "Weights are split within their layers (tensor parallelism), which sparsify does not support; use fully_shard "
    "(FSDP2) or DistributedDataParallel only."
)
OUTER_MODULE = (
    "fully_shard was given a module around the sparsified model; give sparsify that module too, so that it can gather "
    "the weights."
)
# How fully_shard places weights: on one mesh dimension of shards, or with replicas of the shards (HSDP).
PLACEMENTS = (["Shard"], ["Replicate", "Shard"])


def own_class(module: nn.Module) -> type:
    """Returns a module's class as it was before `fully_shard`, which derives one from it."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module, so that its weights are there only within calls."""
    return getattr(module, "_is_fsdp_managed_module", False)


def refuse_sharding(modules: Iterable[nn.Module]) -> None:
    """Raises a SparsityError if one of the modules has weights that are sharded other than by `fully_shard`."""
    for module in modules:
        # FSDP1 replaces parameters by plain tensors, or marks them as parts of a flat one.
        if type(module).__name__ == "FullyShardedDataParallel" or (
            is_sharded(module) and isinstance(vars(module).get("weight"), Tensor)
        ):
            raise SparsityError(FSDP_1)
        for parameter in module._parameters.values():
            if getattr(parameter, "_fsdp_flattened", False):
                raise SparsityError(FSDP_1)
            if hasattr(parameter, "ds_id"):
                raise SparsityError(ZERO_3)
            if isinstance(parameter, DTensor):
                placements = [type(placement).__name__ for placement in parameter.placements]
                if not is_sharded(module) or placements not in PLACEMENTS:
                    raise SparsityError(TENSOR_PARALLEL)


@contextmanager
def staying_gathered(model: nn.Module, running: nn.Module) -> Iterator[None]:
    """Context for a backward pass that runs within calls of `running` and of the modules around it.

    At the end of each backward pass, FSDP frees all gathered weights, also those of modules whose calls still run. They
    are gathered again on exit. `model` is a module around `running`, or the same.
    """
    if not is_sharded(running):
        yield
        return
    gathered = [name for name, parameter in running.named_parameters() if not isinstance(parameter, DTensor)]
    yield
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(inner is running for inner in module.modules()):
            module.unshard()
    if any(isinstance(running.get_parameter(name), DTensor) for name in gathered):
        raise SparsityError(OUTER_MODULE)


def computing_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype in which a model's first weight is used: its own, or the one that FSDP gathers weights in."""
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return next((state._mp_policy.param_dtype for state in states), None) or next(model.parameters()).dtype


def computing_device(weight: Tensor) -> torch.device:
    """Returns the device on which a weight is used: its own, or the one that FSDP gathers an offloaded weight on."""
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device
