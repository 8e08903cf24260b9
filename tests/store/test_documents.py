"""documents.json: a history is read as it was written, says nothing about the texts, and is refused if damaged."""

import base64
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from pace import at_most
from random_texts import words
from stored_adapter import save

from sebp_edge import AdapterStore
from sebp_edge.errors import AdapterError
from sebp_edge.lessons.split_history import find_unseen, take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.run.start import latest_history
from sebp_edge.store.saved import DOCUMENTS
from sebp_edge.store.version_documents import Entry, read_history, write_history
from sebp_edge.values.remembered import FOLD_ROLES, SPLITS, KnownDocument, SplitHistory

# The roles in files before there were more than three folds.
PACKED = (*SPLITS, *FOLD_ROLES[:3])


def random_history(count: int, number: int = 500) -> SplitHistory:
    draw = np.random.default_rng(0)

    def one_of(values):
        return [*values, None][draw.integers(len(values) + 1)]

    def document() -> KnownDocument:
        return KnownDocument(
            hash=f"{draw.integers(2**64, dtype=np.uint64):016x}",
            split=one_of(PACKED),
            drawn_split=one_of(SPLITS),
            drawn_fold=one_of([0, 1, 2]),
            num_shingles=number,
            sketch=np.unique(draw.integers(2**32, size=number, dtype=np.uint32))[:64],
        )

    return SplitHistory(tuple(document() for _ in range(count)), b"salt")


def values_of(history: SplitHistory) -> list[tuple]:
    return [(document, list(document.sketch)) for document in history.documents]


@pytest.fixture
def history() -> SplitHistory:
    """A history of long and short documents, of two versions."""
    texts = dict(enumerate([words(size, size) for size in range(1, 100, 3)] + ["", "港"]))
    first = draw_splits(take_fingerprints(texts, b"salt"), 0, SplitHistory(salt=b"salt"))
    return draw_splits(take_fingerprints({5: texts[5], 6: texts[6]}, b"salt"), 0, first.history).history


def pack(path, **changes):
    """Writes the file as it was until format 2: a column for each value."""
    values = json.loads(path.read_text())
    documents = values["documents"]

    def numbers(found, dtype):
        return base64.b64encode(np.array(list(found), dtype).tobytes()).decode()

    def choices(name, options):
        return "".join("-" if one[name] is None else str(options.index(one[name])) for one in documents)

    columns = {
        "keys": numbers((int(one["hash"], 16) for one in documents), "<u8"),
        "num_shingles": numbers((one["num_shingles"] for one in documents), "<u4"),
        "sketches": numbers((hash for one in documents for hash in one["sketch"]), "<u4"),
        "splits": choices("drawn_split", SPLITS),
        "folds": choices("drawn_fold", (0, 1, 2)),
        "roles": choices("split", PACKED),
        "absent": choices("absent", (False, True)),
        "numbers": numbers((one["number"] or 0 for one in documents), "<u4"),
        "tokens": numbers((one["tokens"] or 0 for one in documents), "<u4"),
        "names": [one["name"] for one in documents],
    }
    path.write_text(json.dumps({"format": 2, "salt": values["salt"]} | columns | changes))


def test_a_packed_file_is_read_as_the_plain_one(tmp_path):
    for history in (SplitHistory(salt=b"salt"), random_history(300)):
        write_history(tmp_path, history, {document.key: Entry(1, 5, "a.md") for document in history.documents})
        plain = read_history(tmp_path)
        pack(tmp_path / DOCUMENTS)
        found = read_history(tmp_path)
        assert (values_of(found), found.salt) == (values_of(plain), plain.salt)


def test_a_file_of_format_1_is_read_with_the_stores_salt_and_without_names(history, tmp_path):
    write_history(tmp_path, history, {history.documents[0].key: Entry(1, 5, "a.md")})
    pack(tmp_path / DOCUMENTS, format=1)
    found = read_history(tmp_path, b"store")
    assert found.salt == b"store"
    assert {document.name for document in found.own} == {None}
    unnumbered = SplitHistory(tuple(replace(each, number=None, tokens=None) for each in found.documents))
    assert values_of(unnumbered) == values_of(history)


@pytest.mark.parametrize(
    "damage",
    [
        {"keys": ""},
        {"keys": 5},
        {"keys": "not base64!"},
        {"keys": "AAAA"},
        {"keys": "ä"},
        {"num_shingles": "AAAAAA=="},
        {"sketches": ""},
        {"sketches": "AAAAAA=="},
        {"splits": "0"},
        {"splits": "7" * 35},
        {"folds": "x" * 35},
        {"roles": 7},
        {"salt": None},
    ],
)
def test_a_damaged_packed_file_is_refused(damage, history, tmp_path):
    write_history(tmp_path, history)
    pack(tmp_path / DOCUMENTS, **damage)
    with pytest.raises(AdapterError, match=r"documents\.json' cannot be read, so .* restore the file, or remove"):
        read_history(tmp_path)


def test_a_history_that_was_read_draws_the_same(tmp_path):
    texts = {number: words(100, number) for number in range(60)}
    first = draw_splits(take_fingerprints(texts, b"salt"), 0)
    write_history(tmp_path, first.history)
    grown = take_fingerprints(texts | {number: words(100, number) for number in range(60, 90)}, b"salt")
    read = read_history(tmp_path)
    assert draw_splits(grown, 1, read).split_of == draw_splits(grown, 1, first.history).split_of
    assert find_unseen(read, grown) == find_unseen(first.history, grown)


def test_a_history_of_many_folds_is_read_and_no_earlier_sebp_edge_takes_it_for_damaged(tmp_path):
    texts = take_fingerprints({number: words(100, number) for number in range(30)}, b"salt")
    for most, number in ((0, 3), (100, 4)):
        drawn = draw_splits(texts, 0, most_in_folds=most).history
        write_history(tmp_path, drawn)
        assert json.loads((tmp_path / DOCUMENTS).read_text())["format"] == number
        assert values_of(read_history(tmp_path)) == values_of(drawn)


def test_a_version_without_the_file_has_no_history(tmp_path):
    assert read_history(tmp_path) is None


@pytest.mark.slow
def test_five_thousand_documents_take_a_small_file_that_is_read_quickly(tmp_path):
    write_history(tmp_path, random_history(5000))
    assert (tmp_path / DOCUMENTS).stat().st_size < 5_000_000
    with at_most(3):
        assert len(read_history(tmp_path).documents) == 5000


@pytest.mark.slow
def test_more_documents_than_other_files_can_hold_are_read(tmp_path):
    drawn = random_history(1000, 64).documents
    many = (replace(document, hash=f"{number:016x}") for number, document in enumerate(drawn * 24))
    write_history(tmp_path, SplitHistory(tuple(many)))
    assert (tmp_path / DOCUMENTS).stat().st_size > 2**24
    assert len(read_history(tmp_path).documents) == 24_000


def test_the_file_has_no_text_and_no_unsalted_hash(tmp_path):
    texts = {number: words(100, number) for number in range(30)}

    def content(salt: bytes) -> dict:
        write_history(tmp_path, draw_splits(take_fingerprints(texts, salt), 0, SplitHistory(salt=salt)).history)
        return json.loads((tmp_path / DOCUMENTS).read_text())

    first, second = content(b"a"), content(b"b")
    assert not set(" ".join(texts.values()).split()) & set(json.dumps(first).replace('"', " ").split())
    for one, other in zip(first["documents"], second["documents"], strict=True):
        assert one["hash"] != other["hash"] and one["sketch"] != other["sketch"]
        assert all(one[name] == other[name] for name in one.keys() - {"hash", "sketch"})


def damaged(**changes):
    """Changes values of the file, or of its last document."""

    def change(path):
        values = json.loads(path.read_text())
        values["documents"][-1] |= {name: value for name, value in changes.items() if name not in values}
        path.write_text(json.dumps(values | {name: value for name, value in changes.items() if name in values}))

    return change


def without(name):
    def change(path):
        values = json.loads(path.read_text())
        (values if name in values else values["documents"][-1]).pop(name)
        path.write_text(json.dumps(values))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
        lambda path: path.write_text("{}"),
        *map(without, ("format", "salt", "documents", "hash", "name", "number", "tokens", "split", "absent")),
        *map(without, ("drawn_split", "drawn_fold", "num_shingles", "sketch")),
        damaged(format="3"),
        damaged(format=0),
        damaged(salt=5),
        damaged(salt="xy"),
        damaged(salt="00" * 65),
        damaged(documents=5),
        damaged(documents=[5]),
        damaged(documents=None),
        damaged(hash=5),
        damaged(hash="12"),
        damaged(name=5),
        damaged(number=-1),
        damaged(tokens="1"),
        damaged(split="fold 7"),
        damaged(split=["train"]),
        damaged(absent=0),
        damaged(drawn_split="fold 1"),
        damaged(drawn_fold=6),
        damaged(num_shingles=2),
        damaged(num_shingles=None),
        damaged(sketch=[]),
        damaged(sketch=[-1]),
        damaged(sketch=[0.5]),
        damaged(sketch=[2**32]),
        damaged(sketch=5),
        damaged(of_a_newer_format=5),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(damage, history, tmp_path):
    assert len(history.documents) == 35
    write_history(tmp_path, history)
    damage(tmp_path / DOCUMENTS)
    with pytest.raises(AdapterError, match=r"documents\.json' cannot be read, so .* restore the file, or remove"):
        read_history(tmp_path)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything can be read")
def test_a_file_that_this_user_may_not_read_is_refused_with_the_reason(history, tmp_path):
    write_history(tmp_path, history)
    (tmp_path / DOCUMENTS).chmod(0)
    with pytest.raises(AdapterError, match=r"cannot be read \(Permission denied\)"):
        read_history(tmp_path)


def test_a_file_of_a_newer_format_is_refused_with_what_to_do(history, tmp_path):
    write_history(tmp_path, history)
    damaged(format=5)(tmp_path / DOCUMENTS)
    with pytest.raises(AdapterError, match=r"newer sebp-edge, in format 5.*Upgrade"):
        read_history(tmp_path)


def test_the_next_version_continues_the_history_of_the_active_one_else_of_the_latest(tmp_path):
    store = AdapterStore(tmp_path)

    def save_known(key, activate=False):
        saved = save(store, activate=activate)
        if key is not None:
            values = {"drawn_split": "test", "drawn_fold": 0, "num_shingles": 0, "sketch": np.empty(0, np.uint32)}
            write_history(saved.path, SplitHistory((KnownDocument(hash=f"{key:016x}", split="test", **values),)))
        return saved

    def latest():
        return [document.key for document in latest_history(store.adapter("mine")).documents]

    assert latest_history(store.adapter("mine")).documents == ()
    save_known(1)
    # A version without a history, as those of 0.1.0.
    save_known(None, activate=True)
    save_known(3)
    assert latest() == [3]
    saved = save_known(4, activate=True)
    save_known(5)
    assert latest() == [4]
    (saved.path / DOCUMENTS).write_text("{}")
    with pytest.raises(AdapterError, match="restore the file, or remove the version"):
        latest_history(store.adapter("mine"))
    store.adapter("mine").remove(4)
    assert latest() == [5]
