"""Loads an encoder with a classification head, for an analysis of its gradients; encoders cannot be adapted."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from sebp_edge.basics.files import read_json
from sebp_edge.engine.models.architecture import ENCODERS
from sebp_edge.engine.models.loading import (
    NEEDS,
    BaseModel,
    load_folder,
    raising_model_error,
    read_config,
    without_progress_bars,
)
from sebp_edge.engine.models.soundness import refuse_non_finite, refuse_other_weights
from sebp_edge.machine import devices
from sebp_edge.values.model_reference import ModelReference

# The modules between the last block and the classes. What a model's files lack of them gets random weights.
_HEAD = {"pooler", "pre_classifier", "classifier"}


def is_encoder(reference: ModelReference) -> bool:
    """Whether a local folder has an encoder of a family whose classifier reads the first token."""
    if reference.kind != "local":
        return False
    with raising_model_error(reference, "has a damaged config.json"):
        config = read_json(Path(reference.location) / "config.json")
    return config.get("model_type") in ENCODERS and not config.get("is_decoder", False)


def load_encoder(reference: ModelReference, device: torch.device, seed: int) -> BaseModel:
    """Loads the encoder in a local folder; `seed` draws the weights of a head that its files lack."""
    dtype, config = devices.pick_dtype(device), read_config(reference, Path(reference.location))
    with raising_model_error(reference, NEEDS), torch.device("meta"):
        on_meta = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    options = {"dtype": dtype, "device_map": {"": device}, "output_loading_info": True}
    with without_progress_bars(), devices.forked_random_state(device):
        torch.manual_seed(seed)
        model, report, tokenizer, identity, folder = load_folder(reference, config, on_meta, options)
    # BERT ends a text with a separator.
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
    missing = set(report["missing_keys"])
    others = [name for name in missing if not _HEAD & set(name.split("."))]
    refuse_other_weights(reference.name, model, report | {"missing_keys": others})
    with raising_model_error(reference, NEEDS):
        refuse_non_finite(reference.name, model, folder)
    return BaseModel(reference, model.eval(), tokenizer, device, dtype, identity, has_new_head=bool(missing))
