"""Makes base models with random weights, to measure time and memory, which do not depend on the weights' values."""

import torch

from sebp_edge.machine.devices import forked_random_state, pick_dtype
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.loading import BaseModel, local_tokenizer, model_from_config


def make_base_model(reference: ModelReference, device: torch.device) -> BaseModel:
    """Makes the model that `reference` names from its config alone; downloads nothing if the model is known by name."""
    dtype = pick_dtype(device)
    with forked_random_state(device):
        torch.manual_seed(0)
        model = model_from_config(reference, device, dtype)
    tokenizer = local_tokenizer(reference)
    return BaseModel(reference, model.eval(), tokenizer, device, dtype, fingerprint="random weights")
