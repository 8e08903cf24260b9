"""Reads the texts and labels of four GLUE tasks, from files named as their publishers name them.

    rte     full_train_*.json (text_a, text_b, label), dev.tsv
    cola    in_domain_train.tsv, in_domain_dev.tsv
    sst2    train.tsv, test.tsv: phrases to train on, whole sentences to evaluate on
    mrpc    msr-para-train.tsv, msr-para-val.tsv

Each task has a folder of its own name; any file may be compressed as .xz. The texts are not part of this project.
"""

import csv
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Labelled(NamedTuple):
    """One or two texts, and their class: 0 or 1."""

    texts: tuple[str, ...]
    label: int


class Task(NamedTuple):
    train: list[Labelled]
    heldout: list[Labelled]


def read_task(folder: Path, name: str) -> Task:
    """Reads the task `name` of `TASKS` in `folder`.

    Raises:
        FileNotFoundError: a file is missing.
    """
    return Task(*(list(part) for part in TASKS[name](folder / name)))


def _rte(folder: Path) -> tuple[Iterator[Labelled], Iterator[Labelled]]:
    files = [json.loads(_text(path)) for path in sorted(folder.glob("full_train_*"))]
    if not files:
        raise FileNotFoundError(f"There is no full_train_*.json in {folder}; give the folder that holds rte.")
    pairs = (each for file in files for each in file.values())
    train = (_pair(each["text_a"], each["text_b"], each["label"] == "entailment") for each in pairs)
    dev = (_pair(one, two, label == "entailment") for _, one, two, label in _rows(folder / "dev.tsv", header=True))
    return train, dev


def _cola(folder: Path) -> tuple[Iterator[Labelled], Iterator[Labelled]]:
    files = (folder / "in_domain_train.tsv", folder / "in_domain_dev.tsv")
    return tuple((Labelled((text,), int(label)) for _, label, _, text in _rows(file)) for file in files)


def _sst2(folder: Path) -> tuple[Iterator[Labelled], Iterator[Labelled]]:
    files = (folder / "train.tsv", folder / "test.tsv")
    return tuple((Labelled((text,), int(label)) for text, label in _rows(file, header=True)) for file in files)


def _mrpc(folder: Path) -> tuple[Iterator[Labelled], Iterator[Labelled]]:
    files = (folder / "msr-para-train.tsv", folder / "msr-para-val.tsv")
    return tuple(
        (_pair(one, two, label == "1") for label, _, _, one, two in _rows(file, header=True)) for file in files
    )


TASKS = {"rte": _rte, "cola": _cola, "sst2": _sst2, "mrpc": _mrpc}


def _pair(one: str, two: str, label: bool) -> Labelled:
    return Labelled((one, two), int(label))


def _rows(path: Path, *, header: bool = False) -> Iterator[list[str]]:
    # Quotation marks are part of the texts.
    rows = csv.reader(_text(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    if header:
        next(rows)
    return rows


def _text(path: Path) -> str:
    packed = path if path.suffix == ".xz" else path.with_name(f"{path.name}.xz")
    return (lzma.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()).decode("utf-8-sig")
