"""Clusters are split into train, validation and test; near-duplicates stay together; documents keep their sides."""

import random
from collections import Counter
from pathlib import Path

import pytest
from pace import at_most
from random_texts import edit, of_split, words

from sebp_edge.errors import TextsError
from sebp_edge.lessons.near_duplicates import compare
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import FOLDS_BELOW, draw_splits
from sebp_edge.values.draw import MIN_CLUSTERS, MIN_TOKENS, Draw
from sebp_edge.values.example import Example
from sebp_edge.values.remembered import FEW_FOLDS, MANY_FOLDS, SplitHistory

SALT, MOST = b"salt", 100
TEXTS = [words(25, number) for number in range(2000)]


def draw(texts, seed: int = 0, history: SplitHistory | None = None, salt: bytes = SALT, most_in_folds=0) -> Draw:
    numbered = texts if isinstance(texts, dict) else dict(enumerate(texts))
    return draw_splits(take_fingerprints(numbered, salt), seed, history, most_in_folds=most_in_folds)


def in_folds(texts, seed: int = 0, history: SplitHistory | None = None) -> Draw:
    return draw(texts, seed, history, most_in_folds=MOST)


def examples_of(documents, chunks: int = 2, tokens: int = 151) -> list[Example]:
    """Makes `chunks` examples of each document, each with `tokens` tokens, all but the first with loss."""
    ids = list(range(tokens))
    return [Example(ids, [-100, *ids[1:]], document) for document in documents for _ in range(chunks)]


def parts_of(split) -> tuple[set[int], set[int], set[int]]:
    return tuple({example.document for example in part} for part in (split.train, split.validation, split.test))


def sides_of(drawn: Draw) -> dict:
    """The side of each document, "train" for those without a fold."""
    return drawn.split_of or {document: drawn.fold_of.get(document, "train") for document in drawn.cluster_of}


# ---------------------------------------------------------------------------------------------------------- first draw


@pytest.mark.parametrize("documents", [6, 7, 8, 13, 19, 20, 21, 60, 2000])
def test_every_document_is_in_exactly_one_part(documents):
    examples = examples_of(range(documents))
    for split in draw(TEXTS[:documents]).splits(examples):
        train, validation, test = parts_of(split)
        assert train and validation and test
        assert not (train & validation or train & test or validation & test)
        assert train | validation | test == set(range(documents))
        assert len(split.train) + len(split.validation) + len(split.test) == len(examples)


def test_the_number_of_clusters_decides_what_is_drawn():
    for documents in range(1, 26):
        texts = [copy for text in TEXTS[:documents] for copy in (text, text.upper())]
        drawn = draw(texts)
        splits = drawn.splits(examples_of(range(len(texts))))
        assert len(set(drawn.cluster_of.values())) == documents
        if documents < MIN_CLUSTERS:
            assert (drawn.kind, splits) == ("none", [])
        elif documents < FOLDS_BELOW:
            assert (drawn.kind, len(splits)) == ("folds", FEW_FOLDS)
        else:
            assert (drawn.kind, len(splits)) == ("split", 1)


def test_a_cluster_with_more_than_a_tenth_of_the_documents_is_trained_on():
    for seed in range(10):
        drawn = draw(TEXTS[:40] + [edit(TEXTS[0], 0.05, number) for number in range(30)], seed)
        assert len({drawn.cluster_of[document] for document in (0, *range(40, 70))}) == 1
        assert {drawn.split_of[document] for document in (0, *range(40, 70))} == {"train"}


def test_the_draw_depends_on_the_seed_and_the_texts_only():
    sides = sides_of(draw(TEXTS[:30]))
    assert sides_of(draw(TEXTS[:30])) == sides
    assert sides_of(draw(TEXTS[:30], salt=b"another")) == sides
    assert sides_of(draw(TEXTS[:30], seed=1)) != sides
    assert sides_of(draw(TEXTS[1:31])) != sides


@pytest.mark.parametrize("count", [12, 40])
def test_the_draw_does_not_depend_on_the_order_of_documents(count):
    texts = TEXTS[:count] + [edit(text, 0.1) for text in TEXTS[: count // 2]] + [" ".join(TEXTS[:3])]
    numbered = dict(enumerate(texts))
    first = draw(numbered)
    for seed in range(3):
        order = random.Random(seed).sample(list(numbered), len(numbered))
        again = draw({number: texts[number] for number in order})
        assert sides_of(again) == sides_of(first)
        # Other numbers for the same documents.
        moved = draw([texts[number] for number in order])
        assert {order[number]: side for number, side in sides_of(moved).items()} == sides_of(first)


def test_too_little_text_is_refused_with_the_figures():
    drawn = draw(TEXTS[:6])
    few = [*examples_of(range(5), 1, 51), Example(list(range(50)), [-100, *range(1, 50)], 5)]
    with pytest.raises(
        TextsError, match=f"^Too little text: {MIN_TOKENS - 1} tokens to train on, but at least {MIN_TOKENS} are needed"
    ):
        drawn.splits(few)
    with pytest.raises(TextsError, match=r"^Too little text: 0 tokens"):
        drawn.splits([])
    assert drawn.splits(examples_of(range(6), 1, 51))  # just enough
    with pytest.raises(TextsError, match=r"^Too little text"):
        draw(TEXTS[:2]).splits(examples_of(range(2), 1, 51))


# ------------------------------------------------------------------------------------------ folds of enough for a split


@pytest.mark.parametrize(
    ("documents", "folds"),
    [
        *((documents, FEW_FOLDS) for documents in range(MIN_CLUSTERS, FOLDS_BELOW)),
        *((documents, MANY_FOLDS) for documents in (FOLDS_BELOW, 21, 60, MOST)),
    ],
)
def test_in_folds_every_document_is_tested_once_and_trained_on_in_all_folds_but_two(documents, folds):
    drawn = in_folds(TEXTS[:documents], seed=1)
    assert (drawn.kind, drawn.num_folds) == ("folds", folds)
    parts = [parts_of(split) for split in drawn.splits(examples_of(range(documents)))]
    times = [Counter(document for split in parts for document in split[part]) for part in range(3)]
    assert times == [Counter(dict.fromkeys(range(documents), number)) for number in (folds - 2, 1, 1)]
    assert [test for _, _, test in parts] == [
        {document for document, fold in drawn.fold_of.items() if fold == number} for number in range(folds)
    ]
    sizes = Counter(drawn.fold_of.values()).values()
    assert max(sizes) - min(sizes) <= 1


def test_documents_keep_their_folds_and_new_ones_come_to_the_smallest():
    first = in_folds(TEXTS[:24])
    grown = in_folds(TEXTS[:42], 5, first.history)
    assert {document: grown.fold_of[document] for document in range(24)} == first.fold_of
    assert list(Counter(grown.fold_of.values()).values()) == [7] * MANY_FOLDS
    # Also after a split, which there is no time for folds for.
    split = draw(TEXTS[:42], 6, grown.history)
    assert split.kind == "split"
    assert in_folds(TEXTS[:42], 7, split.history).fold_of == grown.fold_of


# ----------------------------------------------------------------------------------------------------- near-duplicates


def assert_no_relatives_on_two_sides(texts: list[str], drawn: Draw) -> None:
    fingerprints = take_fingerprints(dict(enumerate(texts)), SALT)
    numbers, sides = list(fingerprints), sides_of(drawn)
    found = compare([fingerprint.shingles for fingerprint in fingerprints.values()])
    assert found.near
    for first, second in (*found.near, *found.holding):
        assert sides[numbers[first]] == sides[numbers[second]]


@pytest.mark.slow
def test_no_near_duplicates_are_on_two_sides():
    for seed in range(2):
        folder = Path(__file__).parents[2] / "examples/notes"
        notes = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/*.md"))]
        texts = [*notes, *(edit(note, 0.1, seed) for note in notes), *(f"{one}\n{one.upper()}" for one in notes[:5])]
        texts.append("\n\n".join(notes[10:15]))
        drawn = draw(texts, seed)
        assert drawn.kind == "split"
        assert Counter(drawn.split_of.values())["test"] >= 10
        assert_no_relatives_on_two_sides(texts, drawn)
        # The same if half of it was there before.
        before = draw({number: texts[number] for number in range(0, len(texts), 2)}, seed)
        assert_no_relatives_on_two_sides(texts, draw(texts, seed, before.history))


def test_a_document_that_holds_all_others_leaves_nothing_to_judge():
    drawn = draw([*TEXTS[:40], "\n".join(TEXTS[:40])])
    assert drawn.kind == "none"
    assert drawn.splits(examples_of(range(41))) == []


@pytest.mark.parametrize(
    "texts",
    [
        ["", " ", "\n\t", "", "\u200b", "\u3000", "-", "--", "?", "!", ".", "…", ",", ";", ":"],
        ["🎉", "🎈🎈", "🎂" * 9, "👩‍👩‍👧", "🎉 🎉", "🌊🌊🌊🌊", "🚲", "🧭🗺"],
        ["港", "風と波", "古い地図", "パンとスープ", "六時の船", "西の風", "家", "本を読む"],
        [],
    ],
)
def test_strange_texts_are_drawn_too(texts):
    drawn = draw(texts)
    assert drawn.cluster_of.keys() == set(range(len(texts)))
    assert draw(texts, history=drawn.history).fold_of == drawn.fold_of


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("count", [13, 19, 20, 60, 500])
def test_documents_keep_their_sides_and_new_ones_fill_the_quotas(count):
    first = draw(TEXTS[:count])
    again = draw(TEXTS[:count], 1, first.history)
    assert sides_of(again) == sides_of(first)
    if count >= FOLDS_BELOW:
        grown = draw(TEXTS[: 2 * count], 2, again.history)
        assert {document: grown.split_of[document] for document in range(count)} == first.split_of
        assert Counter(grown.split_of.values()) == Counter(draw(TEXTS[: 2 * count]).split_of.values())


@pytest.mark.parametrize("count", [15, 60])
def test_edited_documents_keep_their_sides(count):
    first = drawn = draw(TEXTS[:count])
    texts = TEXTS[:count]
    for version in range(1, 6):
        texts = [edit(text, 0.1, version) for text in texts]
        drawn = draw(texts, version, drawn.history)
        assert sides_of(drawn) == sides_of(first)
        # Only the last wording is remembered.
        assert len(drawn.history.documents) == count


def test_a_new_copy_is_on_the_side_of_the_remembered_document():
    first = draw(TEXTS[:60])
    texts = TEXTS[:60] + [edit(text, 0.1) for text in TEXTS[:60]]
    both = draw(texts, 1, first.history)
    assert all(
        both.split_of[document] == both.split_of[document + 60] == first.split_of[document] for document in range(60)
    )
    # Also if the document itself was removed.
    copies = draw(texts[60:], 1, first.history)
    assert copies.split_of == first.split_of


@pytest.mark.parametrize("count", [18, 100])
def test_a_removed_document_keeps_its_side_until_it_comes_back(count):
    first = draw(TEXTS[:count])
    less = draw({document: TEXTS[document] for document in range(count) if document % 4}, 1, first.history)
    other = draw({document: TEXTS[document] for document in range(count) if document % 4 != 1}, 2, less.history)
    assert less.kind == other.kind == first.kind
    back = draw(TEXTS[:count], 3, other.history)
    assert sides_of(back) == sides_of(first)


@pytest.mark.parametrize(
    "sides",
    [
        ("train", "test", "train"),
        ("test", "test", "test"),
        ("validation", "train", "train"),
        ("test", "validation", "train", "validation"),
    ],
)
def test_a_new_document_that_holds_remembered_ones_retires_them(sides):
    first = draw(TEXTS[:60])
    held = [of_split(first, side)[number] for number, side in enumerate(sides)]
    bridged = draw([*TEXTS[:60], " ".join(TEXTS[document] for document in held)], 1, first.history)
    assert {bridged.split_of[document] for document in (*held, 60)} == {"train"}
    others = set(range(60)) - {*held}
    assert all(bridged.split_of[document] == first.split_of[document] for document in others)
    # They are trained on for good.
    again = draw([*TEXTS[:60], " ".join(TEXTS[document] for document in held)], 2, bridged.history)
    assert again.split_of == bridged.split_of
    assert {draw(TEXTS[:60], 3, again.history).split_of[document] for document in held} == {"train"}


def test_a_near_duplicate_of_documents_of_two_sides_retires_the_tested_one():
    first = draw(TEXTS[:60])
    tested, trained = of_split(first, "test")[0], of_split(first, "train")[0]
    mixture = f"{TEXTS[tested]} {TEXTS[trained]}"  # about half of it is in each
    drawn = draw([*TEXTS[:60], mixture], 1, first.history)
    assert len({drawn.cluster_of[document] for document in (tested, trained, 60)}) == 1
    assert {drawn.split_of[document] for document in (tested, trained, 60)} == {"train"}


def test_documents_in_two_folds_that_are_connected_are_trained_on():
    first = draw(TEXTS[:15])
    one = next(document for document, fold in first.fold_of.items() if fold == 0)
    other = next(document for document, fold in first.fold_of.items() if fold == 2)
    drawn = draw([*TEXTS[:15], f"{TEXTS[one]} {TEXTS[other]}"], 1, first.history)
    assert drawn.fold_of == {document: fold for document, fold in first.fold_of.items() if document not in (one, other)}


def test_with_another_salt_nothing_is_recognised():
    first = draw(TEXTS[:60])
    drawn = draw(TEXTS[:60], 1, draw(TEXTS[:60], salt=b"another").history)
    assert drawn.split_of == draw(TEXTS[:60], 1).split_of != first.split_of


@pytest.mark.slow
def test_two_thousand_documents_with_a_history_are_drawn_in_seconds():
    first = draw(TEXTS)
    texts = [edit(text, 0.1) if number % 2 else text for number, text in enumerate(TEXTS)]
    with at_most(1.6):
        assert draw(texts, 1, first.history).split_of == first.split_of
