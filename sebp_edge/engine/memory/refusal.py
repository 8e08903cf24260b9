"""Refuses to load a model that cannot be trained in this machine's memory, before anything large is downloaded."""

from dataclasses import replace

import torch

from sebp_edge.basics.units import parameters, sizes_apart
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.memory.prediction import host_bytes, predict_footprint
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.loading import model_from_config
from sebp_edge.engine.models.model_shape import shape_of
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.errors import MachineError
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.values.model_reference import ModelReference


def refuse_if_too_big(reference: ModelReference, recipe: Recipe, device: torch.device) -> int:
    """Compares the free memory of `device` with the minimum that a training needs, without activations.

    Returns of how many blocks the frozen matrices must stay in host memory: 0, or on a GPU that is too small, all.
    """
    shape = shape_of(model_from_config(reference), reference.name)
    on_gpu, itemsize = device.type == "cuda", devices.pick_dtype(device, shape.hidden).itemsize
    setup = TrainingSetup(shape, recipe.with_defaults(), on_gpu, has_kernels=on_gpu, itemsize=itemsize)
    free, sizes = devices.free_memory(device), [Bucket(1, 1, 1, 1)]
    most = len(shape.blocks) if on_gpu and setup.is_lora else 0
    for streamed in sorted({0, most}):
        setup = replace(setup, options=MemoryOptions(streamed_blocks=streamed))
        needed = predict_footprint(setup, sizes, [], context=0).minimum
        if needed <= free:
            break
    else:
        shown, left, total = sizes_apart(needed, free, devices.total_memory(device))
        why = " (this GPU has no bf16, so weights take 4 bytes each)" if devices.lacks_bf16(device) else ""
        with_two = ", with two of its blocks on the GPU at a time" if most else ""
        raise MachineError(
            f"{reference.name!r} has {parameters(shape.parameters)} parameters and needs at least "
            f"{shown} to adapt with the recipe {recipe.name!r}{why}{with_two}; this machine's {device.type.upper()} "
            f"has {left} free of {total}; choose a smaller model or close other programs."
        )
    host, free_on_host = host_bytes(setup, sizes), devices.free_memory(torch.device("cpu"))
    if (streamed or setup.embeddings_on_host) and host > free_on_host:
        shown, left = sizes_apart(host, free_on_host)
        why = "The GPU is too small for the weights" if streamed else "The GPU does not hold the lookup tables"
        raise MachineError(
            f"{why} of {reference.name!r}, and in host memory they need {shown}, but {left} are free; choose a smaller "
            "model or close other programs."
        )
    return streamed
