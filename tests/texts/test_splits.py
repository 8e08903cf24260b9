"""Documents are split into train, validation and test; no test document is trained on; folds test every document."""

import pytest

from sebp_edge.errors import TextsError
from sebp_edge.texts.examples import Example
from sebp_edge.texts.splits import FOLDS_BELOW, MIN_DOCUMENTS, MIN_TOKENS, NUM_FOLDS, split_documents


def examples_of(documents: int, chunks: int = 2, tokens: int = 51) -> list[Example]:
    """Makes `chunks` examples of each document, each with `tokens` tokens, all but the first with loss."""
    ids = list(range(tokens))
    return [Example(ids, [-100, *ids[1:]], document) for document in range(documents) for _ in range(chunks)]


def documents_of(examples: list[Example]) -> set[int]:
    return {example.document for example in examples}


def parts_of(split) -> tuple[set[int], set[int], set[int]]:
    return documents_of(split.train), documents_of(split.validation), documents_of(split.test)


@pytest.mark.parametrize("documents", [6, 7, 8, 13, 19, 20, 21, 60, 1000, 5000])
def test_every_document_is_in_exactly_one_part(documents):
    examples = examples_of(documents)
    for split in split_documents(examples, seed=0):
        train, validation, test = parts_of(split)
        assert train and validation and test
        assert not (train & validation or train & test or validation & test)
        assert train | validation | test == set(range(documents))
        assert len(split.train) + len(split.validation) + len(split.test) == len(examples)


@pytest.mark.parametrize("documents", range(MIN_DOCUMENTS, FOLDS_BELOW))
def test_every_document_is_in_one_test_fold(documents):
    splits = split_documents(examples_of(documents), seed=1)
    assert len(splits) == NUM_FOLDS
    tested = [document for split in splits for document in documents_of(split.test)]
    assert sorted(tested) == list(range(documents))


@pytest.mark.parametrize(
    ("documents", "validation", "test"), [(20, 4, 5), (40, 4, 6), (60, 6, 9), (200, 20, 30), (5000, 100, 200)]
)
def test_the_sizes_of_the_parts_of_twenty_documents_or_more(documents, validation, test):
    [split] = split_documents(examples_of(documents), seed=0)
    assert [len(part) for part in parts_of(split)] == [documents - validation - test, validation, test]


def test_the_split_depends_on_the_seed_only():
    examples = examples_of(30)
    assert split_documents(examples, seed=3) == split_documents(examples, seed=3)
    assert split_documents(examples, seed=3) != split_documents(examples, seed=4)


def test_examples_keep_their_order_within_a_part():
    [split] = split_documents(examples_of(30), seed=0)
    assert split.train == sorted(split.train, key=lambda example: example.document)


def test_too_little_text_is_refused_with_the_figures():
    with pytest.raises(
        TextsError, match=f"^Too little text: {MIN_TOKENS - 1} tokens to train on, but at least {MIN_TOKENS} are needed"
    ):
        split_documents([*examples_of(5, 1), Example(list(range(50)), [-100, *range(1, 50)], 5)], seed=0)
    with pytest.raises(TextsError, match=r"^Too little text: 0 tokens"):
        split_documents([], seed=0)
    assert split_documents(examples_of(6, 1), seed=0)  # just enough
