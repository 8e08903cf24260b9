"""What generating makes of a recipe, of its defaults, and of a text that is longer than the context."""

from itertools import pairwise

import pytest
from builders import make_chats, make_sentences

from sebp_edge import Personalizer
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.events import silent
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.generating import _end_of


@pytest.mark.parametrize(
    ("texts", "chat_template", "is_chat"),
    [
        (make_sentences(20, seed=2), True, False),
        (make_sentences(12, seed=2) + make_chats(11), False, False),
        (make_sentences(11, seed=2) + make_chats(11), False, False),
        (make_sentences(11, seed=2) + make_chats(12), False, True),
        (
            [{"prompt": q, "completion": a} for q, a in zip(make_sentences(20), make_sentences(20, 1), strict=True)],
            *(True,) * 2,
        ),
        (
            [{"prompt": q, "completion": a} for q, a in zip(make_sentences(20), make_sentences(20, 1), strict=True)],
            *(False,) * 2,
        ),
        (make_chats(3), False, True),
    ],
    ids=["notes", "fewer chats", "as many", "more chats", "pairs as chats", "pairs", "sections"],
)
def test_the_majority_of_documents_decides_how_prompts_are_rendered(make, texts, chat_template, is_chat):
    personalizer = make(recipe=make().recipe.replace(chat_template=chat_template, epochs=1))
    base = personalizer.in_use.load(silent)
    assert make_dataset(read_texts(texts), base.tokenizer, personalizer.recipe, None, Drawing(0)).is_chat is is_chat


def test_generate_has_the_defaults_of_sampling():
    signature = Personalizer.generate.__kwdefaults__
    assert {name: signature[name] for name in vars(Sampling())} == vars(Sampling())


def test_what_is_read_begins_at_the_same_word_while_a_text_grows():
    text, begins = " ".join(make_sentences(300)), []
    for length in range(0, len(text), 7):
        found = _end_of(text[:length], 400)
        assert text[:length].endswith(found)
        assert min(length, 100) <= len(found) <= 400
        begins.append(length - len(found))
    changes = [new - old for old, new in pairwise(begins) if new != old]
    assert all(change > 0 for change in changes) and len(changes) <= len(text) / 200
    assert all(begin == 0 or text[begin].isspace() for begin in begins)
    assert len(_end_of("x" * 5000, 400)) in range(200, 401)
