"""Writes the files of a merged model beside its weights: its config and its tokenizer.

They begin with the base model's own files, so that no setting is lost that only other programs read.
"""

import json
import shutil
from pathlib import Path

from sebp_edge.basics.files import read_json
from sebp_edge.engine.models import older_names
from sebp_edge.errors import ExportError
from sebp_edge.export.source import Source

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
# Families whose theta mlx-lm knows if config.json does not say it.
_SAME_THETA = ("llama", "mistral", "gemma", "gemma2", "gemma3_text", "phi3")
_TOKENIZER_FILES = (
    "tokenizer.json",
    _TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_settings(folder: Path, source: Source) -> None:
    """Writes all files of a merged model but the weights."""
    dtype = str(source.weights.dtype).removeprefix("torch.")
    _write(
        folder / _CONFIG,
        older_names.complete_config(source.config, own_config(source), type(source.model).__name__, dtype),
    )
    if (settings := source.base_path / _GENERATION).is_file():
        shutil.copyfile(settings, folder / _GENERATION)
    elif source.reference.is_gguf:
        source.model.generation_config.save_pretrained(folder)
    _write_tokenizer(folder, source)


def check_settings(folder: Path, source: Source) -> None:
    """Refuses a merged model in whose config some programs read other settings than the base model's."""
    values = read_json(folder / _CONFIG)
    readers = {"programs that read all names": (), "transformers 5": older_names.OLDER_ROPE}
    if older_names.has_older_names(source.config):
        readers["transformers 4 and mlx-lm"] = (older_names.ROPE,)
    for programs, unread in readers.items():
        if different := older_names.differing_names(values, source.config, unread):
            raise ExportError(
                f"The exported config.json says something else than the base model's to {programs} "
                f"({', '.join(different)}); nothing was exported. Use --format peft, and please report this."
            )


def check_for_mlx_lm(source: Source) -> None:
    """Refuses a base model's folder from which mlx-lm would read other rotary embeddings than the model's."""
    config, own = source.config, own_config(source)
    if not getattr(config, older_names.ROPE, None):
        return
    is_named = "rope_theta" in own or config.model_type in _SAME_THETA
    if not is_named or older_names.differing_names(own, config, (older_names.ROPE,)):
        raise ExportError(
            "mlx-lm reads rope_theta and rope_scaling in the base model's config.json, and "
            f"{source.reference.public_name} does not say there what rope_parameters says, so mlx-lm would compute "
            "something else; use --format merged, whose folder says both."
        )


def own_config(source: Source) -> dict:
    """Returns the values of the base model's own config.json, of its text part if it has others; {} for a GGUF file."""
    path = source.base_path / _CONFIG
    own = read_json(path) if path.is_file() else {}
    return own["text_config"] if own.get("model_type") != source.config.model_type and "text_config" in own else own


def _write_tokenizer(folder: Path, source: Source) -> None:
    if (source.base_path / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (source.base_path / name).is_file():
                shutil.copyfile(source.base_path / name, folder / name)
    else:
        source.tokenizer.save_pretrained(folder)
    if (settings := folder / _TOKENIZER).is_file():
        _write(settings, older_names.readable_by_older(read_json(settings)))


def _write(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
