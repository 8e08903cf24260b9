"""A base model of the true shape with random weights, for what does not depend on their values: time and memory."""

import torch

from sebp_edge.machine.devices import pick_dtype
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.loading import BaseModel, model_of_shape, refuse_if_too_big, tokenizer_at_hand
from sebp_edge.recipe import Recipe


def make_base_model(reference: ModelReference, recipe: Recipe, device: torch.device) -> BaseModel:
    """The model that `reference` names, from its config alone; of a model known by name nothing is downloaded.

    Raises:
        ModelError: its config cannot be had, or it is no decoder.
        MachineError: it does not fit into this machine's memory.
    """
    dtype = pick_dtype(device)
    refuse_if_too_big(reference, model_of_shape(reference).config, recipe, device, dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = model_of_shape(reference, device, dtype)
    tokenizer = tokenizer_at_hand(reference)
    return BaseModel(reference, model.eval(), tokenizer, device, dtype, fingerprint="random weights")
