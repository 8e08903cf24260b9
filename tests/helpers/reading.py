"""The one door to the readers for tests, which compare contents, left-out items and error messages."""

import random
from pathlib import Path

import pytest

from formats.damage import damage
from sebp_edge.errors import TextsError
from sebp_edge.reading.readers import MEMORY_PER_BYTE, MIN_SIZE, read_all, read_texts
from sebp_edge.values.documents import Conversation, LeftOut, NotRead, PromptCompletion

__all__ = [
    "MEMORY_PER_BYTE",
    "MIN_SIZE",
    "Conversation",
    "NotRead",
    "PromptCompletion",
    "assert_survives",
    "contents",
    "is_count_of_words",
    "left_out",
    "read_all",
    "read_texts",
    "refusal",
    "write_file",
]


def contents(texts) -> list:
    return [document.content for document in read_texts(texts).documents]


def left_out(texts) -> dict[str, str]:
    return {item.source: item.reason for item in read_texts(texts).left_out}


def is_count_of_words(item: LeftOut) -> bool:
    """Whether this is what the second counter says of a file (`sebp_edge.reading.formats.coverage`)."""
    return item.kind == "words that were not read"


def write_file(folder: Path, name: str, data: str | bytes) -> Path:
    """Writes a file exactly as given, without newline translation."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def assert_survives(folder: Path, name: str, whole: bytes, times: int = 150) -> None:
    """Damages a file in many ways: it is read in part, or left out for a short reason."""
    for seed in range(times):
        path = write_file(folder, name, whole)
        damage(path, random.Random(seed))
        assert all("\n" not in item.reason and len(item.reason) < 200 for item in read_all(folder).left_out)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def refusal(texts) -> str:
    with pytest.raises(TextsError) as caught:
        read_texts(texts)
    return str(caught.value)
