"""A version's history tells which documents its judged states have not seen, also if they were edited or removed."""

import pytest
from random_texts import edit, of_split, words

from sebp_edge.lessons.split_history import Unseen, find_unseen, take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.values.draw import Draw
from sebp_edge.values.remembered import SplitHistory

TEXTS = [words(100, number) for number in range(200)]


def fingerprints(texts):
    return take_fingerprints(texts if isinstance(texts, dict) else dict(enumerate(texts)), b"salt")


def draw(texts, history=None, most_in_folds=0) -> Draw:
    return draw_splits(fingerprints(texts), 0, history, most_in_folds=most_in_folds)


def test_the_test_documents_of_a_split_are_unseen():
    drawn = draw(TEXTS[:60])
    tested = dict.fromkeys(of_split(drawn, "test"), 0)
    assert find_unseen(drawn.history, fingerprints(TEXTS[:60])) == Unseen(tested, num_tests=9, num_found=9)


@pytest.mark.parametrize(("count", "folds"), [(15, 3), (40, 6)])
def test_each_document_is_unseen_by_the_state_of_the_fold_that_tests_it(count, folds):
    drawn = draw(TEXTS[:count], most_in_folds=100)
    unseen = find_unseen(drawn.history, fingerprints(TEXTS[:count]))
    assert unseen == Unseen(drawn.fold_of, num_tests=count, num_found=count)
    assert drawn.history.num_folds == folds


def test_nothing_is_unseen_if_all_documents_were_trained_on():
    drawn = draw(TEXTS[:5])
    assert find_unseen(drawn.history, fingerprints(TEXTS[:5])) == Unseen({}, num_tests=0, num_found=0)


@pytest.mark.parametrize("count", [5, 15, 60])
def test_new_documents_are_unseen_by_all_states(count):
    history = draw(TEXTS[:count]).history
    assert find_unseen(history, fingerprints(TEXTS[100:110])).states == dict.fromkeys(range(10))
    assert find_unseen(history, fingerprints(TEXTS[100:110])).num_found == 0
    assert find_unseen(SplitHistory(), fingerprints(TEXTS[:3])) == Unseen(dict.fromkeys(range(3)), 0, 0)


@pytest.mark.parametrize("count", [15, 60])
def test_edited_documents_count_as_the_document_itself(count):
    history = draw(TEXTS[:count]).history
    edited = [edit(text, 0.08) for text in TEXTS[:count]]
    assert find_unseen(history, fingerprints(edited)) == find_unseen(history, fingerprints(TEXTS[:count]))
    # Beside the documents themselves, too.
    both = find_unseen(history, fingerprints([*TEXTS[:count], *edited])).states
    assert {document - count: state for document, state in both.items() if document >= count} == {
        document: state for document, state in both.items() if document < count
    }


def test_parts_of_documents_that_were_trained_on_are_seen():
    drawn = draw(TEXTS[:60])
    first_halves = {document: " ".join(TEXTS[document].split()[:50]) for document in range(60)}
    for texts in (
        first_halves,
        {number + 60: text for number, text in first_halves.items()} | dict(enumerate(TEXTS[:60])),
    ):
        states = find_unseen(drawn.history, fingerprints(texts)).states
        assert {document % 60 for document in states} == set(of_split(drawn, "test"))


def test_a_document_that_holds_others_is_unseen_only_if_all_are():
    drawn = draw(TEXTS[:60])
    tested = of_split(drawn, "test")
    trained = of_split(drawn, "train")
    texts = {
        100: " ".join(TEXTS[document] for document in tested[:4]),
        101: " ".join(TEXTS[document] for document in (*tested[:3], trained[0])),
        102: " ".join(TEXTS[document] for document in trained[:4]),
    }
    assert find_unseen(drawn.history, fingerprints(texts)).states == {100: 0}
    folds = draw(TEXTS[:15])
    of_fold = [[document for document, fold in folds.fold_of.items() if fold == number] for number in range(3)]
    texts = {
        100: " ".join(TEXTS[document] for document in of_fold[1][:3]),
        101: " ".join(TEXTS[document] for document in (*of_fold[1][:2], of_fold[2][0])),
    }
    assert find_unseen(folds.history, fingerprints(texts)).states == {100: 1}


def test_the_test_documents_that_are_still_there_are_counted():
    drawn = draw(TEXTS[:60])
    tested = of_split(drawn, "test")
    left = {document: TEXTS[document] for document in range(60) if document not in tested[:4]}
    left[tested[4]] = edit(TEXTS[tested[4]], 0.08)
    found = find_unseen(drawn.history, fingerprints(left))
    assert (found.num_tests, found.num_found) == (9, 5)
    assert found.states == dict.fromkeys(tested[4:], 0)


def test_only_the_documents_of_the_version_count():
    first = draw(TEXTS[:60])
    second = draw(TEXTS[60:120], first.history)
    assert len(second.history.documents) == 120
    # The second version has trained on none of the first one's documents.
    assert find_unseen(second.history, fingerprints(TEXTS[:60])).states == dict.fromkeys(range(60))


def test_the_next_draw_trains_on_no_document_that_the_version_is_tested_with():
    first = draw(TEXTS[:60])
    texts = [edit(text, 0.08) if number % 3 else text for number, text in enumerate(TEXTS[10:100])]
    second = draw(texts, first.history)
    both = {
        document
        for document in find_unseen(first.history, fingerprints(texts)).states
        if second.split_of[document] == "test"
    }
    assert len(both) >= 9
    seen = [number for number in range(50) if first.split_of[number + 10] == "test"]
    assert all(second.split_of[number] == "test" for number in seen)


def test_documents_that_are_no_longer_there_are_remembered_without_a_role():
    first = draw(TEXTS[:60])
    second = draw(TEXTS[:30], first.history)
    gone = [document for document in second.history.documents if document.split is None]
    keys = {fingerprint.key for fingerprint in fingerprints(TEXTS[30:60]).values()}
    assert {document.key for document in gone} == keys
    assert {document.drawn_split for document in gone} == {"train", "validation", "test"}


def test_roles_name_the_fold():
    drawn = draw([*TEXTS[:15], " ".join(TEXTS[:3])])
    roles = dict(zip(fingerprints([*TEXTS[:15], " ".join(TEXTS[:3])]), drawn.history.documents, strict=True))
    assert {number: document.split for number, document in roles.items()} == {
        **dict.fromkeys((0, 1, 2, 15), "train"),
        **{number: f"fold {fold + 1}" for number, fold in drawn.fold_of.items()},
    }
    assert {document.split for document in draw(TEXTS[:5]).history.documents} == {"train"}
