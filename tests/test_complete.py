"""`Personalizer.complete`: with the adapter in use, with another, with none; of texts of any length."""

import random
import threading

import pytest
from builders import WORDS

from sebp_edge import Completion
from sebp_edge.errors import Interrupted, TextsError

BEFORE = "the ferry left at six and the w"
EACH = {"min_probability": 0.0, "max_new_tokens": 6}


@pytest.mark.slow
def test_it_uses_the_adapter_in_use_a_stored_one_or_none(make):
    plain, personalizer = make().complete(BEFORE, **EACH), make(after=True)
    personalizer.load_adapter("default")
    adapted = personalizer.complete(BEFORE, **EACH)
    assert adapted.text and adapted.words != plain.words
    for _ in range(2):
        assert personalizer.complete(BEFORE, adapter=None, **EACH).words == plain.words
        assert personalizer.complete(BEFORE, **EACH).words == adapted.words
    assert make().complete(BEFORE, adapter="default", **EACH).words == adapted.words


def test_the_words_are_those_received_and_none_if_the_model_is_not_sure(make):
    personalizer, received = make(), []
    found = personalizer.complete(BEFORE, on_text=received.append, **EACH)
    assert tuple(received) == found.words and found.text == "".join(received)
    assert list(found.probabilities) == sorted(found.probabilities, reverse=True)
    assert personalizer.complete(BEFORE, min_probability=1.0) == Completion()


def test_texts_longer_than_the_context_are_completed(make):
    """The model has a context of 128 tokens."""
    personalizer, text = make(), " ".join(random.choices(WORDS, k=3000))
    for length in (0, 1, 40, 400, 4096, 4097, len(text)):
        assert personalizer.complete(text[:length], **EACH).num_tokens >= 0
    assert personalizer.complete("🏝" * 3000, **EACH).num_tokens >= 0
    assert personalizer.complete(BEFORE, max_new_tokens=10_000).num_tokens >= 0


def test_a_stopped_call_says_so_and_the_next_one_works(make):
    personalizer, event = make(), threading.Event()

    def stop(word):
        event.set()

    with pytest.raises(Interrupted):
        personalizer.complete(BEFORE, on_text=stop, stop_when=event, **EACH)
    found, expected = (each.complete(BEFORE, **EACH) for each in (personalizer, make()))
    assert found.words == expected.words
    assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-4)


@pytest.mark.parametrize(("before", "message"), [(None, "is of type NoneType"), ("a\ud800", "not valid Unicode")])
def test_what_is_no_text_is_refused(make, before, message):
    with pytest.raises(TextsError, match=f"before.*{message}"):
        make().complete(before)
