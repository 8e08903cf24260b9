"""Reads documents.json of the formats 1 and 2, which had a column for each value of the documents.

Numbers were packed in base64, and choices in one character each. Format 1 had neither a salt nor names.
"""

import base64
from collections.abc import Mapping, Sequence
from itertools import islice

FORMATS = (1, 2)
_SPLITS = ("train", "validation", "test")
_ROLES = (*_SPLITS, "fold 1", "fold 2", "fold 3")
_FOLDS = (0, 1, 2)
_SKETCH_SIZE = 64


def unpack(values: Mapping, store_salt: bytes) -> dict:
    """Returns the values as they are written now; raises a LookupError, TypeError or ValueError if they are invalid."""
    hashes, counts = _numbers(values["keys"], 8), _numbers(values["num_shingles"], 4)
    shingles = iter(_numbers(values["sketches"], 4))
    sketches = [list(islice(shingles, min(count, _SKETCH_SIZE))) for count in counts]
    if next(shingles, None) is not None:
        raise ValueError("sketches")
    unknown = [None] * len(hashes)
    columns = {
        "hash": [f"{hash:016x}" for hash in hashes],
        "name": values.get("names", unknown) if values["format"] == 2 else unknown,
        "number": _numbers(values["numbers"], 4) if "numbers" in values else unknown,
        "tokens": _numbers(values["tokens"], 4) if "numbers" in values else unknown,
        "split": _choices(values["roles"], _ROLES),
        "absent": _choices(values.get("absent", "0" * len(hashes)), (False, True)),
        "drawn_split": _choices(values["splits"], _SPLITS),
        "drawn_fold": _choices(values["folds"], _FOLDS),
        "num_shingles": counts,
        "sketch": sketches,
    }
    documents = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    return {"salt": store_salt.hex() if values["format"] == 1 else values["salt"], "documents": documents}


def _numbers(text: str, size: int) -> list[int]:
    """Returns the unsigned little-endian numbers of `size` bytes that were packed into a text."""
    content = base64.b64decode(text, validate=True)
    return [int.from_bytes(content[at : at + size], "little") for at in range(0, len(content), size)]


def _choices(text: str, options: Sequence) -> list:
    """Returns the option of each digit, and None for "-"."""
    return [None if character == "-" else options[int(character)] for character in text]
