"""What is known of models without torch: their shapes and tokenizers, as a process with torch once read them.

Those of the models with short names ship; others are kept in the cache once they were read on this machine, by their
files and the versions of the packages that read them.
"""

import json
from dataclasses import asdict, dataclass
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
from sebp_edge.engine.models.shape import Block, BlockKind, DecoderShape, DecoderSizes, Kept, LinearShape
from sebp_edge.values.model_reference import BUNDLED_FOLDER, ModelReference

BUNDLED = Path(__file__).parent / "configs" / "shapes.json"
# The largest vocabularies take 17 MB; so many models are kept.
_MAX_BYTES, _MAX_KEPT = 2**26, 8


class KnownModel(NamedTuple):
    """What a plan asks of a model."""

    shape: DecoderShape
    tokenizer: KnownTokenizer


@dataclass(frozen=True)
class _ShapeValues(DecoderSizes):
    """A shape in JSON: blocks that are alike stand in it once."""

    linears: dict
    blocks: dict
    kept_outside: dict | None = None


def recall_model(reference: ModelReference) -> KnownModel | None:
    """Returns what is known of a model; None if it must be read first."""
    is_there = reference.kind != "hub" or cached_folder(reference.location) is not None
    if reference.kind == "bundled" or (not is_there and bundled_config(reference)):
        known = read_json(BUNDLED)
        name = Path(bundled_config(reference) or DEFAULT_MODEL).stem
        tokenizer = parse_dataclass(known["tokenizer"], TokenizerFacts)
        rust = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json"))
        return KnownModel(shape_from(known["shapes"][name], reference.name), KnownTokenizer(tokenizer, rust))
    file = _file_of(reference)
    try:
        if file is None:
            return None
        known = read_json(file, _MAX_BYTES)
        facts, rust = parse_dataclass(known["tokenizer"], TokenizerFacts), Tokenizer.from_str(known["rust"])
        return KnownModel(shape_from(known["shape"], reference.name), KnownTokenizer(facts, rust))
    except (OSError, ValueError, LookupError):
        return None


def remember_model(reference: ModelReference, shape: DecoderShape, tokenizer) -> None:
    """Keeps what was read of a model on this machine, unless it ships."""
    file = _file_of(reference)
    if reference.kind == "bundled" or file is None or not tokenizer.is_fast:
        return
    facts, rust = asdict(TokenizerFacts.of(tokenizer)), tokenizer.backend_tokenizer.to_str()
    written = json.dumps({"shape": values_of(shape), "tokenizer": facts, "rust": rust})
    write_cache(f"{file.parent.name}/{file.name}", written)
    kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for old in kept[:-_MAX_KEPT]:
        old.unlink(missing_ok=True)


def _file_of(reference: ModelReference) -> Path | None:
    digest = files_digest(reference)
    if digest is None:
        return None
    versions = (__version__, version("torch"), version("transformers"), digest)
    return cache_folder() / "models" / f"{blake2b(' '.join(versions).encode(), digest_size=16).hexdigest()}.json"


def values_of(shape: DecoderShape) -> dict:
    """Returns a shape as JSON-ready values, without its name."""
    distinct = shape.distinct_blocks
    blocks = [
        {
            "linears": block.linears,
            "kind": block.kind and block.kind._asdict(),
            "kept": block.kept and block.kept._asdict(),
        }
        for block in distinct
    ]
    sizes = list(dict.fromkeys(shape.linears))
    values = {name: value for name, value in vars(shape).items() if name in DecoderShape.__dataclass_fields__}
    del values["name"]
    return values | {
        "linears": {"sizes": sizes, "order": [sizes.index(linear) for linear in shape.linears]},
        "blocks": {"distinct": blocks, "order": shape.order},
        "kept_outside": shape.kept_outside and shape.kept_outside._asdict(),
    }


def shape_from(values: dict, name: str) -> DecoderShape:
    """Returns a shape of the values of JSON."""
    known = parse_dataclass(values, _ShapeValues)
    try:
        sizes = list(map(LinearShape._make, known.linears["sizes"]))
        distinct = [
            Block(dict(zip(one["linears"], map(LinearShape._make, one["linears"].values()), strict=True)), kind, kept)
            for one in known.blocks["distinct"]
            for kind, kept in [(_kind(one["kind"]), _kept(one.get("kept")))]
        ]
    except (TypeError, AttributeError) as error:
        raise ValueError("these are not the values of a shape") from error
    return DecoderShape(
        **vars(known)
        | {
            "name": name,
            "linears": tuple(sizes[number] for number in known.linears["order"]),
            "blocks": tuple(distinct[number] for number in known.blocks["order"]),
            "kept_outside": _kept(known.kept_outside),
        }
    )


def _kind(values: dict | None) -> BlockKind | None:
    if values is None:
        return None
    return BlockKind(**{name: tuple(one) if isinstance(one, list) else one for name, one in values.items()})


def _kept(values: dict | None) -> Kept | None:
    return values and Kept(tuple(map(tuple, values["by_run"])), values["multiple"])
