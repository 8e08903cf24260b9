"""What is known of models without torch: their shapes and tokenizers, as a process with torch once read them.

Those of the models with short names ship; others are kept in the cache once they were read on this machine, by their
files and the versions of the packages that read them.
"""

import json
from dataclasses import asdict, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from sebp_edge.basics.files import cache_folder, parse_dataclass, read_json, write_cache
from sebp_edge.basics.version import __version__
from sebp_edge.engine.models.catalog import DEFAULT_MODEL, bundled_config
from sebp_edge.engine.models.files_digest import files_digest
from sebp_edge.engine.models.hub_cache import cached_folder
from sebp_edge.engine.models.known_tokenizer import KnownTokenizer, TokenizerFacts
from sebp_edge.engine.models.shape import DecoderShape
from sebp_edge.values.model_reference import BUNDLED_FOLDER, ModelReference

BUNDLED = Path(__file__).parent / "configs" / "shapes.json"
# The largest vocabularies take 17 MB; so many models are kept.
_MAX_BYTES, _MAX_KEPT = 2**26, 8


class KnownModel(NamedTuple):
    """What a plan asks of a model."""

    shape: DecoderShape
    tokenizer: KnownTokenizer


def recall_model(reference: ModelReference) -> KnownModel | None:
    """Returns what is known of a model; None if it must be read first."""
    is_there = reference.kind != "hub" or cached_folder(reference.location) is not None
    if reference.kind == "bundled" or (not is_there and bundled_config(reference)):
        known = read_json(BUNDLED)
        name = Path(bundled_config(reference) or DEFAULT_MODEL).stem
        rust = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json"))
        return _parse(reference, known["shapes"][name], known["tokenizer"], rust)
    file = _file_of(reference)
    try:
        if file is None:
            return None
        known = read_json(file, _MAX_BYTES)
        return _parse(reference, known["shape"], known["tokenizer"], Tokenizer.from_str(known["rust"]))
    except (OSError, ValueError, LookupError):
        return None


def _parse(reference: ModelReference, shape: dict, facts: dict, rust: Tokenizer) -> KnownModel:
    tokenizer = KnownTokenizer(parse_dataclass(facts, TokenizerFacts), rust)
    return KnownModel(replace(parse_dataclass(shape, DecoderShape), name=reference.name), tokenizer)


def remember_model(reference: ModelReference, shape: DecoderShape, tokenizer) -> None:
    """Keeps what was read of a model on this machine, unless it ships."""
    file = _file_of(reference)
    if reference.kind == "bundled" or file is None or not tokenizer.is_fast:
        return
    facts, rust = asdict(TokenizerFacts.of(tokenizer)), tokenizer.backend_tokenizer.to_str()
    values = asdict(replace(shape, name=""))
    write_cache(f"{file.parent.name}/{file.name}", json.dumps({"shape": values, "tokenizer": facts, "rust": rust}))
    kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for old in kept[:-_MAX_KEPT]:
        old.unlink(missing_ok=True)


def _file_of(reference: ModelReference) -> Path | None:
    digest = files_digest(reference)
    if digest is None:
        return None
    versions = (__version__, version("torch"), version("transformers"), digest)
    return cache_folder() / "models" / f"{blake2b(' '.join(versions).encode(), digest_size=16).hexdigest()}.json"
