"""Refuses to load a model that cannot be trained in this machine's memory, before anything large is downloaded."""

import torch

from sebp_edge.basics.units import sizes_apart
from sebp_edge.engine.memory.prediction import predict_footprint
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.loading import model_from_config
from sebp_edge.engine.models.model_shape import shape_of
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.errors import MachineError
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.values.model_reference import ModelReference


def refuse_if_too_big(reference: ModelReference, recipe: Recipe, device: torch.device) -> None:
    """Compares the free memory of `device` with the minimum that a training needs, without activations."""
    shape = shape_of(model_from_config(reference), reference.name)
    on_gpu, itemsize = device.type == "cuda", devices.pick_dtype(device, shape.hidden).itemsize
    setup = TrainingSetup(shape, recipe.with_defaults(), on_gpu, has_kernels=on_gpu, itemsize=itemsize)
    needed = predict_footprint(setup, [Bucket(1, 1, 1, 1)], [], context=0).minimum
    free = devices.free_memory(device)
    if needed > free:
        shown, left, total = sizes_apart(needed, free, devices.total_memory(device))
        why = " (this GPU has no bf16, so weights take 4 bytes each)" if devices.lacks_bf16(device) else ""
        raise MachineError(
            f"{reference.name!r} has {shape.parameters / 1e9:.2f} billion parameters and needs at least "
            f"{shown} to adapt with the recipe {recipe.name!r}{why}; this machine's {device.type.upper()} has {left} "
            f"free of {total}; choose a smaller model or close other programs."
        )
