"""Loads a base model and its tokenizer with transformers.

Models are loaded from local folders and GGUF files only: the bundled folder, the user's own, or the Hub's cache. No
remote code is run.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging as transformers_logging

from sebp_edge.basics.files import read_json
from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.models import hub
from sebp_edge.engine.models.architecture import lookup_tables
from sebp_edge.engine.models.fingerprint import file_fingerprint, fingerprint
from sebp_edge.engine.models.four_bits import INSTALL_4_BITS, NF4_BLOCK, has_bitsandbytes
from sebp_edge.engine.models.gguf_base import lazy_weights, open_gguf, read_gguf_config, read_gguf_tokenizer
from sebp_edge.engine.models.hub_cache import tokenizer_folder
from sebp_edge.engine.models.libraries import without_fla
from sebp_edge.engine.models.soundness import (
    refuse_missing_weights,
    refuse_non_finite,
    refuse_other_weights,
    refuse_special_files,
    refuse_too_many_modules,
    refuse_too_small_sizes,
)
from sebp_edge.engine.models.streaming import move_to_device
from sebp_edge.engine.models.vocabulary import Vocabulary
from sebp_edge.errors import MachineError, ModelError, SebpEdgeError
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.values.model_reference import BUNDLED_FOLDER, ModelReference

_META = torch.device("meta")
# Never run code that comes with a model; without this, transformers prompts on the terminal.
FILES_ONLY = {"local_files_only": True, "trust_remote_code": False}
NEEDS = "cannot be loaded; its folder needs config.json, a tokenizer and complete safetensors weights"
_NEEDS_GGUF = "cannot be loaded; its GGUF file is damaged or of a kind that is not known"
# The most characters of a library's reason that a sentence holds.
_MAX_REASON = 200
# What models that also see or hear call the weights of their text part, and what the text part alone calls them.
TEXT_PART = {r"^language_model\.lm_head\.": "lm_head.", r"^(?:model\.)?language_model\.(?:model\.)?": "model."}


@dataclass(frozen=True)
class BaseModel:
    """A base model in memory."""

    reference: ModelReference
    model: PreTrainedModel  # in evaluation mode, on `device`
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype  # of its computation, and of its weights except those of linear layers if `in_4bit`
    fingerprint: str  # identifies the base model; adapters record it
    has_new_head: bool = False  # whether its head has random weights, since its files have none; only an encoder's may
    streamed_blocks: int = 0  # of how many blocks the frozen matrices are in host memory (see `streaming`)
    placed_for: str | None = None  # the method of training that decides where its lookup tables are; None without any

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters()

    @property
    def in_4bit(self) -> bool:
        """Whether its linear layers are in 4 bits."""
        return getattr(self.model, "is_loaded_in_4bit", False)

    @property
    def precision(self) -> str:
        """The number format of its linear layers: "nf4" for 4 bits, or the name of `dtype`."""
        return "nf4" if self.in_4bit else str(self.dtype).removeprefix("torch.")

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of its tokens."""
        return Vocabulary(self.tokenizer, self.model.config.get_text_config().vocab_size)

    @property
    def pad_token_id(self) -> int:
        """The token for padding.

        Many models have no pad token, or one without an embedding; EOS serves as one, and the attention mask masks it.
        """
        known = self.model.get_input_embeddings().weight.shape[0]
        tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in tokens if token is not None and token < known)


def refuse_unknown_tokens(model: nn.Module, input_ids: Iterable[int]) -> None:
    """Refuses tokens without an embedding: on a GPU they would break CUDA for the whole process."""
    known, largest = model.get_input_embeddings().weight.shape[0], max(input_ids, default=0)
    if largest >= known:
        raise ModelError(
            f"The tokenizer returned token {largest}, but the model has embeddings for {known} tokens only; use the "
            "model's own tokenizer."
        )


def load_base_model(
    reference: ModelReference,
    recipe: Recipe,
    device: torch.device,
    check: Check = lambda: None,
    streamed_blocks: int = 0,
) -> BaseModel:
    """Loads the model that `reference` names.

    If an adapter is trained on a GPU, its lookup tables stay in host memory.

    Args:
        check: called between its parts; may raise to end the loading.
        streamed_blocks: of how many blocks the frozen matrices stay in host memory, in a recipe that trains an adapter.
    """
    in_4_bits = bool(recipe.load_in_4bit)
    config = _read_decoder_config(reference, None if reference.is_gguf else hub.config_folder(reference))
    dtype = devices.pick_dtype(device, config.get_text_config().hidden_size)
    options = {"dtype": dtype, "device_map": {"": device}, "output_loading_info": True}
    options |= {"ignore_mismatched_sizes": True}  # reports them, instead of an error without their names
    if in_4_bits:
        options |= _four_bit_options(device, dtype)
    with raising_model_error(reference, _NEEDS_GGUF if reference.is_gguf else NEEDS):
        without_weights = _on_meta(config)
    placed_for = recipe.method if device.type == "cuda" and lookup_tables(without_weights) else None
    stays_in_part = streamed_blocks or placed_for == "lora"
    if stays_in_part:
        # The files stay mapped, and the GPU never holds more than one block besides what stays on it.
        options |= {"device_map": {"": torch.device("cpu")}}
        options.pop("quantization_config", None)
    with without_progress_bars():
        load = _load_gguf if reference.is_gguf else load_folder
        model, report, tokenizer, identity, folder = load(reference, config, without_weights, options, check)
    refuse_other_weights(reference.name, model, report)
    check()

    def check_block(block: nn.Module) -> None:
        check()
        refuse_non_finite(reference.name, block, folder)

    with raising_model_error(reference, NEEDS):
        if stays_in_part:
            move_to_device(model, device, streamed_blocks, dtype if in_4_bits else None, check_block)
        _make_exact(reference, model, device)
        refuse_non_finite(reference.name, model, folder)
    placement = {"streamed_blocks": streamed_blocks, "placed_for": placed_for}
    return BaseModel(reference, model.eval(), tokenizer, device, dtype, identity, **placement)


def load_folder(
    reference: ModelReference, config, without_weights, options: dict, check: Check = lambda: None
) -> tuple:
    """Returns model, transformers' report, tokenizer, fingerprint, and the folder with the safetensors files."""
    folder = hub.model_folder(reference)
    with raising_model_error(reference, NEEDS):
        refuse_special_files(reference.name, folder)
        refuse_missing_weights(reference.name, without_weights, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, **FILES_ONLY)
        tokenizer("a")  # some damage shows only in use
        _reserve_memory(without_weights, options)
        check()
        options = options | {"key_mapping": TEXT_PART, "use_safetensors": True} | FILES_ONLY
        loaded = type(without_weights).from_pretrained(folder, config=config, **options)
        check()
        return *loaded, tokenizer, fingerprint(type(loaded[0]).__name__, folder), folder


def _load_gguf(reference: ModelReference, config, without_weights, options: dict, check: Check) -> tuple:
    """Like `load_folder`, from a GGUF file; there is no folder."""
    with raising_model_error(reference, _NEEDS_GGUF), open_gguf(reference) as file:
        file.forget_tokenizer()  # which is read by itself
        weights = lazy_weights(file, without_weights, options["dtype"], check)
        tokenizer = read_gguf_tokenizer(reference)
        tokenizer("a")
        check()
        identity = file_fingerprint(file.path)
        _reserve_memory(without_weights, options)
        loaded = type(without_weights).from_pretrained(None, config=config, state_dict=weights, **options)
        return *loaded, tokenizer, identity, None


def _reserve_memory(without_weights: PreTrainedModel, options: dict) -> None:
    """Makes torch's caching allocator reserve memory for each 16-bit weight separately, before they are loaded.

    Otherwise transformers makes it reserve one segment for all of them. No part of it could be freed, and the memory of
    weights that are later concatenated would be lost: a gigabyte for a 3B model.
    """
    device, dtype = options["device_map"][""], options["dtype"]
    if device.type != "cuda" or "quantization_config" in options:
        return
    reserved = [torch.empty(weight.shape, dtype=dtype, device=device) for weight in without_weights.parameters()]
    reserved.clear()


@without_fla()
def _on_meta(config) -> PreTrainedModel:
    """Makes the model of a config without weights; allocates nothing."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _four_bit_options(device: torch.device, dtype: torch.dtype) -> dict:
    """Returns options that make transformers load linear layers in NF4 with quantised scales, all else in `dtype`."""
    if not has_bitsandbytes():
        raise MachineError(f"A base model in 4 bits needs bitsandbytes, which is not installed; run {INSTALL_4_BITS}.")
    if device.type not in ("cuda", "cpu"):
        raise MachineError(f"A base model in 4 bits runs on NVIDIA GPUs and CPUs, not on {device.type}; use 16 bits.")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config}


def _make_exact(reference: ModelReference, model: PreTrainedModel, device: torch.device) -> None:
    """Prevents bitsandbytes from repacking 4-bit weights, as it may on CPUs, and refuses layers that it gets wrong."""
    for layer in model.modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        # Weights repacked for inference pass no gradient, and their scales are rounded irreversibly.
        layer.support_avx512bf16_for_cpu = False
        # On the CPU, bitsandbytes 0.50 reads the blocks' scales of such a layer in the wrong order.
        if device.type == "cpu" and layer.in_features % NF4_BLOCK:
            raise ModelError(
                f"{reference.name!r} has a layer with {layer.in_features} inputs, but 4 bits on the CPU are exact only "
                f"for multiples of {NF4_BLOCK}; load it in 16 bits."
            )


@contextmanager
def raising_model_error(reference: ModelReference, fault: str) -> Iterator[None]:
    """Context that turns errors of libraries about damaged files, bare Exceptions included, into a ModelError."""
    try:
        yield
    except SebpEdgeError:
        raise
    except BaseException as error:
        if ran_out_of_memory(error):
            raise MachineError(
                f"Out of memory while loading {reference.name!r}; choose a smaller model or close other programs."
            ) from error
        if type(error).__name__.startswith("StrictDataclass"):
            # Of huggingface_hub's checks of configs; its cause says which value is wrong.
            reason = shorten(str(error.__cause__ or error), _MAX_REASON, placeholder=" ...")
            raise ModelError(f"The config of {reference.name!r} is damaged: {reason}; download it again.") from error
        if isinstance(error, ImportError):
            # What quantised weights need, for example.
            raise ModelError(f"The model {reference.name!r} needs a package that is not installed: {error}") from error
        # A panic in a Rust library is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"The model {reference.name!r} {fault} ({type(error).__name__}).") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context without transformers' progress bars: an SDK must not draw on its host's terminal."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def read_config(reference: ModelReference, path: Path):
    """Reads and checks the config in a model's folder, or in a file."""
    fault = "has an architecture unknown to this version of transformers, or a damaged config.json"
    with raising_model_error(reference, fault):
        refuse_too_many_modules(reference.name, read_json(path / "config.json" if path.is_dir() else path))
        return AutoConfig.from_pretrained(path, **FILES_ONLY)


def decoder_config(reference: ModelReference):
    """Reads the config of the decoder that `reference` names, which need not be on this machine."""
    return _read_decoder_config(reference, None if reference.is_gguf else hub.config_path(reference))


def _read_decoder_config(reference: ModelReference, path: Path | None):
    """Reads the config in a folder or file, or in the model's GGUF file, and refuses one that is not a decoder's."""
    if path is None:
        with raising_model_error(reference, _NEEDS_GGUF):
            config = read_gguf_config(reference)
    else:
        config = read_config(reference, path)
        text = getattr(config, "text_config", None)
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            # The text part of a model that also sees or hears.
            if quantised := getattr(config, "quantization_config", None):
                text.quantization_config = quantised
            text.tie_word_embeddings |= config.tie_word_embeddings
            config = text
    # Encoders have a causal-LM class too; they are recognised by a masked-LM class without `is_decoder`.
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder or is_encoder:
        raise ModelError(f"{reference.name!r} is a {config.model_type} model; expected a decoder that generates text.")
    return config


@without_fla()
def model_from_config(
    reference: ModelReference, device: torch.device = _META, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Makes the model that `reference` names with random weights, from its config alone; on "meta" without weights."""
    config = decoder_config(reference)
    with raising_model_error(reference, "cannot be made from its config"), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    refuse_too_small_sizes(reference.name, model)
    return model


def local_tokenizer(reference: ModelReference) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, or if it is not on this machine, the bundled model's, which gives more tokens."""
    with raising_model_error(reference, "has no tokenizer that can be loaded"):
        if reference.is_gguf:
            return read_gguf_tokenizer(reference)
        return AutoTokenizer.from_pretrained(tokenizer_folder(reference) or BUNDLED_FOLDER, **FILES_ONLY)
