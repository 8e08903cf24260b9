"""Questions become examples: only answers have loss, and the quiz asks what is not trained on."""

from dataclasses import replace

import pytest
from builders import make_tokenizer

from sebp_edge import Recipe
from sebp_edge.errors import TextsError
from sebp_edge.questions import examples as module
from sebp_edge.questions.examples import MAX_WORDINGS, MIN_QUESTIONS, QUIZ_SIZE, add_questions
from sebp_edge.questions.general_texts import TEXTS, general_examples
from sebp_edge.questions.practice import practice_notes
from sebp_edge.texts.dataset import Drawing, make_dataset
from sebp_edge.texts.documents import Completion
from sebp_edge.texts.examples import NO_DOCUMENT, TURNS
from sebp_edge.texts.general_probe import read_probe
from sebp_edge.texts.readers import read_texts
from sebp_edge.texts.remembered import TRAIN

pytestmark = pytest.mark.slow

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINGS = ["boiler", "bicycle", "canoe", "piano", "kettle", "ladder", "lantern", "compost heap", "gate", "freezer"]
PEOPLE = ["Anna", "Bruno", "Clara", "Dario", "Edith", "Fabian", "Greta", "Henrik", "Ines", "Jonas"]
NOTES = [
    f"# The {thing}\n\n{person} repaired the {thing} on {day} May. It stands behind the shed. The code is {4000 + day}."
    for day, (thing, person) in enumerate(zip(THINGS, PEOPLE, strict=True), start=3)
]


@pytest.fixture(scope="module", params=["chat", "plain"])
def tokenizer(request):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT if request.param == "chat" else None
    return tokenizer


def asked(texts, tokenizer, seed=0, **changes):
    recipe = Recipe(name="know", description="", questions="rules", context_length=256, chat_template=True)
    recipe = recipe.replace(chat_template=bool(tokenizer.chat_template), **changes)
    reading = read_texts(texts)
    dataset = make_dataset(reading, tokenizer, recipe, None, Drawing(seed))
    return add_questions(dataset, reading, tokenizer, recipe, seed)


def text_of(example, tokenizer):
    return tokenizer.decode(example.input_ids)


def test_all_documents_are_trained_on_and_examples_have_their_numbers(tokenizer):
    found = asked(NOTES, tokenizer)
    (split,) = found.splits()
    assert {example.document for example in split.train} - {NO_DOCUMENT} == set(range(len(NOTES)))
    assert {document.role for document in found.draw.history.documents} == {TRAIN}
    assert all(one in found.trained for one in found.examples)


def test_only_answers_have_loss(tokenizer):
    found = asked(NOTES, tokenizer).questions
    for example in [*found.trained, *found.validation, *found.test]:
        answered = tokenizer.decode([label for label in example.labels if label >= 0])
        assert "repaired" not in answered or "?" not in answered
        assert 0 < example.num_loss_tokens < len(example.input_ids) / 2 + 16


def test_each_turn_asks_all_in_other_words(tokenizer):
    found = asked(NOTES, tokenizer).questions
    turns = [[example for example in found.trained if example.turn == turn] for turn in range(TURNS)]
    assert sum(map(len, turns)) == len(found.trained)
    texts = [{text_of(example, tokenizer) for example in turn if len(example.input_ids) < 60} for turn in turns]
    assert min(map(len, texts)) > 100 and len(set.union(*texts)) > 2.5 * min(map(len, texts))
    assert {example.document for turn in turns for example in turn} == set(range(len(NOTES)))
    assert all({example.document for example in turn} == set(range(len(NOTES))) for turn in turns)


def test_as_many_practice_notes_as_own_ones_are_trained_on_at_most_all(tokenizer, monkeypatch):
    few = practice_notes()[:4]
    monkeypatch.setattr(module, "practice_notes", lambda: few)
    found = asked(NOTES[:3], tokenizer).questions.practice
    assert {example.document for example in found} == {NO_DOCUMENT}
    trained = " ".join(text_of(example, tokenizer) for example in found)
    assert sum(note.questions[0].wordings[0] in trained for note in few) == 3
    trained = " ".join(text_of(example, tokenizer) for example in asked(NOTES, tokenizer).trained)
    assert all(wording in trained for note in few for wording in note.questions[0].wordings[:TURNS])


def test_without_questions_in_keywords_there_is_no_practice(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "ask_by_cues", lambda text, name: [])
    assert asked(NOTES, tokenizer).questions.practice == []


def test_the_quiz_asks_what_is_not_trained_on(tokenizer):
    found = asked(NOTES, tokenizer).questions
    trained = " ".join(text_of(example, tokenizer) for example in found.trained)
    assert MIN_QUESTIONS <= len(found.quiz) <= QUIZ_SIZE
    for question in found.quiz:
        assert question.question not in trained


def test_the_quiz_is_about_many_documents_and_depends_on_the_seed_only(tokenizer):
    seeds = (0, 0, 1)
    quiz = [[(each.document, each.question) for each in asked(NOTES, tokenizer, seed).questions.quiz] for seed in seeds]
    assert quiz[0] == quiz[1] != quiz[2]
    assert len({document for document, _ in quiz[0]}) >= min(len(quiz[0]), len(NOTES)) - 2


def test_a_question_has_a_bounded_number_of_wordings(tokenizer, monkeypatch):
    many = len(asked(NOTES, tokenizer).questions.trained)
    monkeypatch.setattr(module, "MAX_WORDINGS", 1)
    assert len(asked(NOTES, tokenizer).questions.trained) < many / 2 < MAX_WORDINGS * many


def test_documents_that_are_too_long_are_not_put_before_a_question(tokenizer):
    long = NOTES[0] + "\n\n" + "The rain fell on the roof and on the road all day long. " * 40
    found = asked([long, *NOTES[1:]], tokenizer)
    assert all(len(example.input_ids) <= found.context_length for example in found.questions.trained)
    assert all(each.with_document is None for each in found.questions.quiz if each.document == 0)
    assert any(each.with_document is not None for each in found.questions.quiz)


def test_records_are_left_as_they_are(tokenizer):
    records = [{"prompt": f"How much is {n}?", "completion": f"It is {n}, of course."} for n in range(5)]
    found = asked([*NOTES, *records], tokenizer)
    assert max(example.document for example in found.examples) == len(NOTES) + 4
    assert {example.document for example in found.questions.trained} <= set(range(len(NOTES)))
    assert isinstance(read_texts(records).documents[0].content, Completion)


def test_documents_without_facts_are_named_and_too_few_questions_refused(tokenizer):
    assert asked([*NOTES, "hm hm hm hm hm hm hm hm " * 20], tokenizer).questions.without == ("text 11",)
    with pytest.raises(TextsError, match=r"Only \d questions could be made of these documents.*'notes'"):
        asked(["hm " * 100, "so so " * 60], tokenizer)


def test_general_text_is_bounded_drawn_by_the_seed_and_of_no_document(tokenizer):
    none = general_examples(tokenizer, 128, 0, 0)
    some, again, other = (general_examples(tokenizer, 128, 2000, seed) for seed in (0, 0, 1))
    assert none == [] and some == again != other
    assert 2000 <= sum(len(example.input_ids) for example in some) < 2000 + 128
    assert {example.document for example in some} == {NO_DOCUMENT}
    # More than there is: again from the beginning.
    all_of_it = 3_000_000
    assert sum(len(example.input_ids) for example in general_examples(tokenizer, 128, all_of_it, 0)) >= all_of_it


def test_general_text_is_not_in_the_probe():
    def runs(text):
        words = text.split()
        return {" ".join(words[begin : begin + 8]) for begin in range(len(words) - 7)}

    own = runs(TEXTS.read_text(encoding="utf-8"))
    assert len(own) > 10_000
    for document in read_probe():
        assert not own & runs(document.content), document.source


def test_a_dataset_without_questions_keeps_its_splits(tokenizer):
    found = asked(NOTES, tokenizer)
    assert len(replace(found, questions=None).splits()) == 0  # its draw says that all are trained on
