"""A LoRA adapter on a base model. PEFT owns its parameters, its names and its files."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict

from sebp_edge.errors import AdapterError, BaseModelMismatch
from sebp_edge.models.loading import BaseModel
from sebp_edge.recipe import Recipe


class LoraAdapter:
    """Low-rank weights next to every linear projection (Hu et al. 2021), in fp32 whatever the base's dtype."""

    MARKER = "adapter_model.safetensors"

    def __init__(self, model: PeftModel):
        self.model = model

    @classmethod
    def fresh(cls, base: BaseModel, recipe: Recipe, seed: int) -> "LoraAdapter":
        """A new adapter: lora_A random by `seed`, lora_B zero, so that it changes nothing yet."""
        config = LoraConfig(
            r=recipe.r,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(seed)
            model = get_peft_model(base.model, config)
        # get_peft_model writes the folder the base was loaded from; saved adapters name the model, not a path.
        model.peft_config["default"].base_model_name_or_path = base.reference.public_name
        return cls(model.eval())

    @classmethod
    def saved(cls, base: BaseModel, folder: Path) -> "LoraAdapter":
        """An adapter from its folder.

        Raises:
            BaseModelMismatch: its shapes are not this base model's.
            AdapterError: its files are damaged.
        """
        try:
            config = LoraConfig.from_pretrained(str(folder))
            model = get_peft_model(base.model, config)
            # Not PeftModel.from_pretrained: it looks for missing files on the Hub.
            set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        except RuntimeError as error:
            raise BaseModelMismatch(
                f"The adapter in {folder.name!r} was made for another base model than {base.reference.name!r}."
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AdapterError(f"The adapter in {folder.name!r} is damaged ({type(error).__name__}).") from error
        return cls(model.eval())

    def save(self, folder: Path) -> None:
        """Writes adapter_model.safetensors and adapter_config.json, PEFT's own layout."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)

    def detach(self) -> None:
        """Takes the adapter off the base model."""
        self.model.unload()
