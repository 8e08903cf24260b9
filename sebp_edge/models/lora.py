"""A LoRA adapter on a base model. PEFT owns its parameters, its names and its files."""

import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.integrations import dequantize_bnb_weight
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError, SparsityError
from sebp_edge.models.loading import BaseModel
from sebp_edge.ops import LoraProjection, QuantisedWeight
from sebp_edge.recipe import Recipe


class LoraAdapter:
    """Low-rank weights next to every linear projection (Hu et al. 2021), in fp32 whatever the base's dtype."""

    MARKER = "adapter_model.safetensors"

    def __init__(self, model: PeftModel):
        self.model = model

    @classmethod
    def fresh(cls, base: BaseModel, recipe: Recipe, seed: int) -> "LoraAdapter":
        """A new adapter: lora_A random by `seed`, lora_B zero, so that it changes nothing yet.

        Raises:
            ModelError: PEFT refuses the architecture.
        """
        config = LoraConfig(
            r=recipe.settled().r,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        try:
            return cls(_attach(base, config, seed))
        except ValueError as error:
            raise ModelError(
                f"PEFT puts no LoRA adapter on {base.reference.name!r}, a {base.model.config.model_type} model; "
                "train all its weights, with the recipe 'full'."
            ) from error

    @classmethod
    def saved(cls, base: BaseModel, folder: Path) -> "LoraAdapter":
        """An adapter from its folder.

        Raises:
            BaseModelMismatch: its tensors are not those of this base model's linear projections.
            AdapterError: its files are damaged.

        Either way the base model is left as it was.
        """
        config, weights = _read(folder)
        try:
            adapter = cls(_attach(base, config, seed=0))
        except ValueError as error:
            raise _mismatch(base, folder) from error
        expected = get_peft_model_state_dict(adapter.model, save_embedding_layers=False)
        if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in expected.items()}:
            adapter.detach()
            raise _mismatch(base, folder)
        set_peft_model_state_dict(adapter.model, weights)
        return adapter

    def save(self, folder: Path) -> None:
        """Writes adapter_model.safetensors and adapter_config.json, PEFT's own layout."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink()  # PEFT's names the folder of the base model

    def set_aside(self) -> AbstractContextManager:
        """Within it the adapter takes no part."""
        return self.model.disable_adapter()

    def detach(self) -> None:
        """Takes the adapter off the base model."""
        self.model.unload()


def _attach(base: BaseModel, config: LoraConfig, seed: int) -> PeftModel:
    """Puts an adapter with first weights by `seed` on `base`; the process's random state is left as it was."""
    # PEFT writes the base's folder in here, and warns if there is another. What is saved names the model, not a path.
    config.base_model_name_or_path = None
    with (
        torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []),
        warnings.catch_warnings(),
    ):
        # peft 0.21 asks transformers 5.23 for the old name of a property.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        model = get_peft_model(base.model, config)
    config.base_model_name_or_path = base.reference.public_name
    if isinstance(config.target_modules, set):  # whose order is another in each process
        config.target_modules = sorted(config.target_modules)
    return model.eval()


def _read(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """An adapter's settings and tensors, from its folder."""
    try:
        (folder / "adapter_config.json").stat()  # for a missing one PEFT would ask the Hub
        return LoraConfig.from_pretrained(str(folder)), load_file(folder / LoraAdapter.MARKER)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise AdapterError(f"The adapter in {folder.name!r} is damaged ({type(error).__name__}).") from error


def _mismatch(base: BaseModel, folder: Path) -> BaseModelMismatch:
    return BaseModelMismatch(
        f"The adapter in {folder.name!r} was made for another base model than {base.reference.name!r}."
    )


def plain_projection(layer: nn.Module) -> LoraProjection | None:
    """What a PEFT layer computes now, if it is a frozen linear layer with one plain LoRA adapter; else None.

    The base's weight may be in 4 bits. Dropout, DoRA and other variants, several, merged or disabled adapters, and
    adapters with a bias are not plain.
    """
    if not _is_linear(layer) or layer.merged or layer.disable_adapters or len(layer.active_adapters) != 1:
        return None
    base, name = layer.base_layer, layer.active_adapters[0]
    trained = base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)
    if trained or name not in layer.lora_A:
        return None
    if name in layer.lora_variant or layer.lora_bias[name] or type(layer.lora_dropout[name]) is not nn.Identity:
        return None
    weight = base.weight if type(base) is nn.Linear else _in_4_bits(base)
    if weight is None:
        return None
    bias = None if base.bias is None else base.bias.to(weight.dtype)
    lora_A, lora_B = layer.lora_A[name].weight, layer.lora_B[name].weight
    return LoraProjection(weight, bias, lora_A, lora_B, layer.scaling[name])


def _is_linear(layer: nn.Module) -> bool:
    """Whether this is PEFT's layer on a linear one, in full precision or in bitsandbytes' 4 bits."""
    if type(layer) is PeftLoraLinear:
        return type(layer.base_layer) is nn.Linear
    # By its name: to import PEFT's class is to import bitsandbytes, which only 4-bit bases need.
    return f"{type(layer).__module__}.{type(layer).__name__}" == "peft.tuners.lora.bnb.Linear4bit"


def _in_4_bits(base: nn.Module) -> QuantisedWeight | None:
    """The weight of bitsandbytes' layer; None before its first call if it was not told what to compute in."""
    state = base.weight.quant_state
    if state is None or base.compute_dtype is None or _is_packed(state):
        return None
    return QuantisedWeight(base.compute_dtype, partial(_dequantise, base))


def _dequantise(base: nn.Module, place: Tensor) -> None:
    """On a GPU straight to its place, which bitsandbytes does on no CPU."""
    weight = base.weight  # which is another one after a merge
    if place.is_cuda and place.dtype == weight.quant_state.dtype and len(weight) > 1:
        from bitsandbytes.functional import dequantize_4bit

        dequantize_4bit(weight.data, weight.quant_state, out=place)
    else:
        place.copy_(dequantize_bnb_weight(weight))


def _is_packed(quant_state) -> bool:
    """Whether bitsandbytes has put a weight into an order for inference, as it does on CPUs with bf16 instructions."""
    return getattr(quant_state, "packing_format_for_cpu", False)


def refuse_packed_weights(model: nn.Module) -> None:
    """Raises a SparsityError if 4-bit weights are packed for inference: PEFT would train on, with wrong gradients."""
    if any(_is_packed(getattr(parameter, "quant_state", None)) for parameter in model.parameters()):
        raise SparsityError(
            "bitsandbytes has packed this model's 4-bit weights for inference on the CPU, and no gradient flows "
            "through them; load the model again and keep it in training mode."
        )


def without_adapter(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
