"""Attaches a LoRA adapter to a base model. PEFT owns its parameters, names and files."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from sebp_edge.basics.files import read_json
from sebp_edge.basics.weights import (
    SUFFIX_A,
    SUFFIX_B,
    first_non_finite,
    has_rank,
    raising_adapter_error,
    read_weights,
    refuse_non_finite,
)
from sebp_edge.engine.models.libraries import quick_import_of_bitsandbytes
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError, SparsityError
from sebp_edge.machine.devices import forked_random_state
from sebp_edge.ops import FourBits, LoraProjection, QuantisedScales, QuantisedWeight
from sebp_edge.recipe import MAX_LORA_ALPHA, Recipe

with quick_import_of_bitsandbytes():
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora.layer import Linear as PeftLoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.integrations import dequantize_bnb_weight

# PEFT settings in a file that may differ from plain LoRA's: those that are read, and those without effect.
_READ_OR_OF_NO_EFFECT = {
    *("r", "lora_alpha", "target_modules"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
}

# Families of attention and state spaces on whose `out_proj` PEFT refuses adapters.
_WITHOUT_OUT_PROJ = ("falcon_h1", "nemotron_h")
# PEFT's names in a file.
_PREFIX = "base_model.model."


class LoraAdapter:
    """Low-rank weights beside every linear projection (Hu et al. 2021), in fp32 whatever the base model's dtype."""

    FILE = "adapter_model.safetensors"

    def __init__(self, model: PeftModel):
        self.model = model

    @classmethod
    def fresh(cls, base: BaseModel, recipe: Recipe, seed: int) -> "LoraAdapter":
        """Makes a new adapter: lora_A is random by `seed`, lora_B zero, so that it changes nothing yet."""
        targets = "all-linear"
        if refused := refused_layers(base.model):
            targets = [name for name in _linear_layers(base.model) if name.rpartition(".")[2] not in refused]
        config = _config(recipe.with_defaults().r, recipe.lora_alpha, targets)
        try:
            return cls(_attach(base, config, seed))
        except ValueError as error:
            raise ModelError(
                f"PEFT does not support LoRA on {base.reference.name!r}, a {base.model.config.model_type} model; train "
                "all its weights with the recipe 'full'."
            ) from error

    @classmethod
    def from_folder(cls, base: BaseModel, folder: Path) -> "LoraAdapter":
        """Loads an adapter from its folder.

        Raises:
            BaseModelMismatch: its tensors do not fit this base model's linear projections; the model is unchanged.
            AdapterError: its files are damaged or contain NaN or infinity, or it is not plain LoRA; the model is
                unchanged.
        """
        with raising_adapter_error(folder):
            config, weights = _read_config(folder), read_weights(folder / cls.FILE)
            # Before PEFT makes matrices of this rank.
            targets = config.target_modules if isinstance(config.target_modules, set) else ()
            shapes = {name: tensor.shape for name, tensor in weights.items()}
            if not has_rank(config.r, shapes) or len(targets) > len(weights):
                raise _mismatch(base, folder)
            try:
                adapter = cls(_attach(base, config, seed=None))
            except ValueError as error:
                raise _mismatch(base, folder) from error
        try:
            with raising_adapter_error(folder):
                model = adapter.model  # whose parameters are still on "meta"
                own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
                in_file = {name: name.replace(".default.", ".") for name in own}
                if shapes != {in_file[name]: parameter.shape for name, parameter in own.items()}:
                    raise _mismatch(base, folder)
                # Copied: a memory-mapped tensor would change with its file.
                weights = {name: w.to(base.device, torch.float32, copy=True) for name, w in weights.items()}
                refuse_non_finite(weights.items(), folder, cls.FILE)
                model.load_state_dict({name: weights[in_file[name]] for name in own}, strict=False, assign=True)
        except BaseException:
            adapter.detach()
            raise
        return adapter

    @classmethod
    def read_state(cls, base: BaseModel, folder: Path) -> list[Tensor]:
        """Reads an adapter's weights in the order of the parameters that it has when it is attached."""
        # Copied: a memory-mapped tensor would change with its file.
        return [weight.to(torch.float32, copy=True) for weight in cls._mapped_state(base, folder)]

    @classmethod
    def _mapped_state(cls, base: BaseModel, folder: Path) -> list[Tensor]:
        """Returns the weights that `read_state` reads, mapped from their file."""
        with raising_adapter_error(folder):
            _read_config(folder)
            state = (path := folder / cls.FILE).stat()
            weights = read_weights(path)
            if not _are_finite(path, state.st_ino, state.st_size, state.st_mtime_ns):
                refuse_non_finite(weights.items(), folder, cls.FILE)
        names = [
            _PREFIX + module + suffix for module, _ in base.model.named_modules() for suffix in (SUFFIX_A, SUFFIX_B)
        ]
        state = [weights.pop(name) for name in names if name in weights]
        if weights:
            raise _mismatch(base, folder)
        return state

    def take(self, base: BaseModel, folder: Path) -> bool:
        """Takes a saved adapter's weights into its own tensors; returns False if that has others, or another scale."""
        own = self.model.active_peft_config
        with raising_adapter_error(folder):
            config = _read_config(folder)
        if (config.r, config.lora_alpha) != (own.r, own.lora_alpha):
            return False
        # A copy on the host would take longer than all else.
        state = self._mapped_state(base, folder)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if [each.shape for each in state] != [each.shape for each in parameters]:
            return False
        for parameter, value in zip(parameters, state, strict=True):
            parameter.data.copy_(value)
        return True

    def save(self, folder: Path, state: list[Tensor] | None = None) -> None:
        """Writes a snapshot, by default of the present weights, in PEFT's own layout."""
        values = None
        if state is not None:
            names = (name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
            values = dict(zip(names, state, strict=True))
        self.model.create_or_update_model_card = lambda folder: None  # PEFT's names the base model's folder
        self.model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=values)

    def disabled(self) -> AbstractContextManager:
        """Context in which the adapter is disabled."""
        return self.model.disable_adapter()

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Context in which all lora_B are zero, so that what they add is zero."""
        zeroed = [parameter for name, parameter in self.model.named_parameters() if ".lora_B." in name]
        values = [parameter.detach().clone() for parameter in zeroed]
        try:
            for parameter in zeroed:
                parameter.data.zero_()
            yield
        finally:
            for parameter, value in zip(zeroed, values, strict=True):
                parameter.data.copy_(value)

    def detach(self) -> None:
        """Removes the adapter from the base model."""
        self.model.unload()


def refused_layers(model: PreTrainedModel) -> set[str]:
    """Returns the last parts of the names of linear layers that PEFT takes no adapter on in this family.

    They belong to a state space whose fused kernels read the weight itself.
    """
    names = {name.rpartition(".")[2] for name in _linear_layers(model)}
    return names & {"out_proj"} if model.config.model_type in _WITHOUT_OUT_PROJ else set()


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Returns the names of the linear layers without the head."""
    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]


class LoraFactors(NamedTuple):
    """A saved adapter's matrices, memory-mapped: (lora_A, lora_B) by the name of the weight in the base model.

    The adapted weight is W + scale * lora_B lora_A.
    """

    r: int
    lora_alpha: float
    matrices: dict[str, tuple[Tensor, Tensor]]

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r


@lru_cache(maxsize=64)
def _are_finite(path: Path, *_state: int) -> bool:
    """Whether a file in this state has no NaN and no infinity; seeing that takes as long as copying it to a GPU."""
    return first_non_finite(read_weights(path).items()) is None


def read_factors(folder: Path) -> LoraFactors:
    """Reads a saved adapter without a base model."""
    with raising_adapter_error(folder):
        config, weights = _read_config(folder), read_weights(folder / LoraAdapter.FILE)
        refuse_non_finite(weights.items(), folder, LoraAdapter.FILE)
        matrices = {}
        for name in [name for name in weights if name.endswith(SUFFIX_A)]:
            lora_A, lora_B = weights.pop(name), weights.pop(name.removesuffix(SUFFIX_A) + SUFFIX_B)
            if not len(lora_A) == lora_B.shape[1] == config.r:
                raise ValueError("the matrices do not have the rank r")
            matrices[name.removeprefix(_PREFIX).removesuffix(SUFFIX_A) + ".weight"] = lora_A, lora_B
        if weights or not matrices:
            raise ValueError("the tensors are not those of an adapter")
    return LoraFactors(config.r, config.lora_alpha, matrices)


def _config(r: int, lora_alpha: float, target_modules: str | list[str] = "all-linear") -> LoraConfig:
    return LoraConfig(
        r=r, lora_alpha=lora_alpha, lora_dropout=0.0, bias="none", target_modules=target_modules, task_type="CAUSAL_LM"
    )


def _attach(base: BaseModel, config: LoraConfig, seed: int | None) -> PeftModel:
    """Attaches an adapter to `base`, initialised by `seed`; if that is None, on "meta".

    Restores the process's random state and, on failure, the base model.
    """
    # PEFT writes the base model's folder here, and warns if it finds another. A saved adapter names the model instead.
    config.base_model_name_or_path = None
    with forked_random_state(base.device), warnings.catch_warnings():
        # peft 0.21 reads a property of transformers 5.23 by its deprecated name.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed or 0)
        try:
            model = get_peft_model(base.model, config, low_cpu_mem_usage=seed is None)
        except BaseException:
            _take_off(base.model)
            raise
    config.base_model_name_or_path = base.reference.public_name
    if isinstance(config.target_modules, set):  # its order differs between processes
        config.target_modules = sorted(config.target_modules)
    return model.eval()


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """Returns PEFT's layers in a model."""
    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def _take_off(model: nn.Module) -> None:
    """Restores a model's own layers, even if PEFT replaced only some of them."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            model.set_submodule(name, layer.get_base_layer())
    vars(model).pop("peft_config", None)


def _read_config(folder: Path) -> LoraConfig:
    """Reads an adapter's settings; accepts only plain LoRA's, since others change base weights or run code."""
    values = read_json(folder / "adapter_config.json")
    r, lora_alpha, targets = (values.get(name) for name in ("r", "lora_alpha", "target_modules"))
    if type(r) is not int or r < 1 or type(lora_alpha) not in (int, float):
        raise ValueError("r and lora_alpha must be numbers")
    if targets != "all-linear" and not (isinstance(targets, list) and all(type(name) is str for name in targets)):
        raise ValueError("target_modules must be a list of names")
    if not 0 < lora_alpha <= MAX_LORA_ALPHA:
        raise AdapterError(
            f"The adapter in {folder.name!r} has lora_alpha {lora_alpha:g}; it must be above 0 and at most "
            f"{MAX_LORA_ALPHA}."
        )
    config = _config(r, lora_alpha, targets)
    for name, plain in config.to_dict().items():
        if values.get(name, plain) not in (plain, None, False, [], {}) and name not in _READ_OR_OF_NO_EFFECT:
            raise AdapterError(
                f"The adapter in {folder.name!r} sets {name}; sebp-edge loads only plain LoRA adapters without it."
            )
    return config


def _mismatch(base: BaseModel, folder: Path) -> BaseModelMismatch:
    return BaseModelMismatch(
        f"The adapter in {folder.name!r} was made for another base model than {base.reference.name!r}."
    )


def plain_projection(layer: nn.Module) -> LoraProjection | None:
    """Returns a PEFT layer's present projection if it is a frozen linear layer with one plain LoRA adapter, else None.

    The base weight may be in 4 bits. Dropout, DoRA and other variants, several, merged or disabled adapters, and
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
    """Whether this is PEFT's LoRA layer on a linear one, in full precision or in bitsandbytes' 4 bits."""
    if type(layer) is PeftLoraLinear:
        return type(layer.base_layer) is nn.Linear
    # By name: importing PEFT's class imports bitsandbytes, which only 4-bit base models need.
    return f"{type(layer).__module__}.{type(layer).__name__}" == "peft.tuners.lora.bnb.Linear4bit"


def _in_4_bits(base: nn.Module) -> QuantisedWeight | None:
    """Returns the weight of bitsandbytes' layer; None if it is packed, or as long as its compute dtype is unknown."""
    weight = base.weight
    if weight.quant_state is None or base.compute_dtype is None or _is_packed(weight.quant_state):
        return None
    # A merge replaces the weight; while the result refers to this one, no other tensor has its id.
    identity = (id(weight), weight.data_ptr(), weight._version)
    four_bits = four_bits_of(weight) if weight.quant_state.dtype == base.compute_dtype else None
    return QuantisedWeight(base.compute_dtype, partial(_dequantise, weight), identity, four_bits)


def _dequantise(weight: Tensor, out: Tensor) -> None:
    """Dequantises bitsandbytes' weight into `out`; on a GPU directly, which it cannot do on the CPU."""
    if out.is_cuda and out.dtype == weight.quant_state.dtype and len(weight) > 1:
        from bitsandbytes.functional import dequantize_4bit

        dequantize_4bit(weight.data, weight.quant_state, out=out)
    else:
        out.copy_(dequantize_bnb_weight(weight))


def four_bits_of(weight: Tensor) -> FourBits | None:
    """Returns bitsandbytes' weight as our kernels read it; None if it is transposed, or no NF4."""
    state, of_scales = weight.quant_state, None
    if state.quant_type != "nf4" or len(weight) == 1:
        return None
    if state.nested:
        second = state.state2
        of_scales = QuantisedScales(second.code, second.absmax, state.offset, second.blocksize)
    return FourBits(weight.data.view(torch.uint8), state.code, state.absmax, state.blocksize, of_scales)


def _is_packed(quant_state) -> bool:
    """Whether bitsandbytes has packed a weight for inference, as it does on CPUs with bf16 instructions."""
    return getattr(quant_state, "packing_format_for_cpu", False)


def refuse_packed_weights(model: nn.Module) -> None:
    """Raises a SparsityError if 4-bit weights are packed for inference: PEFT would compute wrong gradients."""
    if any(_is_packed(getattr(parameter, "quant_state", None)) for parameter in model.parameters()):
        raise SparsityError(
            "bitsandbytes has packed this model's 4-bit weights for inference on the CPU, and no gradient flows "
            "through them; load the model again and keep it in training mode."
        )


def without_adapter(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside DistributedDataParallel and PEFT wrappers, or the model itself."""
    return without_adapter(model.module if isinstance(model, DistributedDataParallel) else model)
