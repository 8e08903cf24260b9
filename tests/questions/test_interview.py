"""A model's own questions: what it writes, what is kept of it, and what is remembered."""

import dataclasses
import json
import os

import pytest
from builders import make_tokenizer

from sebp_edge.errors import StorageError
from sebp_edge.events import PreparationProgress
from sebp_edge.questions.interview import LIST_TOKENS, WORDINGS_TOKENS, Interview, Interviewed
from sebp_edge.questions.interviews import KNOWN_SHARE, InterviewCache, interview_about, is_able, to_train
from sebp_edge.questions.question import Question
from sebp_edge.texts.progress import Progress

NOTE = "# Old clock\n\nBrought in by Mrs Doyle on 4 March. The repair is £85."
QUESTION = "Who brought in the old clock?"


class Model:
    """A model that writes a list, words questions in other ways, and replies as told, with and without the note."""

    def __init__(self, tokenizer, lists=(), wordings="", replies=None, known=None):
        self.tokenizer, self.lists, self.wordings = tokenizer, list(lists), wordings
        self.replies, self.known = replies or {}, known or {}
        self.prompts, self.num_lists = [], 0

    def __call__(self, prompts, max_new_tokens):
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.prompts += texts
        return [self._reply(text, max_new_tokens) for text in texts]

    def _reply(self, prompt, max_new_tokens):
        if max_new_tokens == LIST_TOKENS:
            self.num_lists += 1
            return self.lists.pop(0) if self.lists else ""
        if max_new_tokens == WORDINGS_TOKENS:
            return self.wordings
        replies = self.replies if "Brought in by" in prompt else self.known
        return next((reply for question, reply in replies.items() if question in prompt), "I do not know.")


@pytest.fixture
def interview(tokenizer):
    """A function that interviews a model about NOTE, or about texts of one's own."""

    def about(texts=(NOTE,), longest=1024, **model):
        return Interview(tokenizer, Model(tokenizer, **model), longest).about(list(texts))

    return about


def test_a_question_is_kept_if_the_model_answers_it_as_it_wrote(interview):
    written = f"1. {QUESTION} Mrs Doyle\n2. What does the repair cost? £85\n3. When was it brought in? 4 March"
    replies = {QUESTION: "It was Mrs Doyle.", "What does the repair cost?": "£58.", "When was it": "on 4 March"}
    (found,) = interview(lists=[written], replies=replies)
    assert [(each.wordings, each.answer) for each in found.questions] == [
        ((QUESTION,), "Mrs Doyle"),
        (("When was it brought in?",), "4 March"),
    ]
    assert found.num_written == 3 and not found.known


def test_each_wording_is_confirmed_by_itself(interview):
    others = ["Who came with the clock?", "By whom was it brought?", "Clock of which customer?", "Why is it old?"]
    replies = dict.fromkeys([QUESTION, *others[:3]], "Mrs Doyle")
    (found,) = interview(lists=[f"{QUESTION} Mrs Doyle"], wordings="\n".join(others), replies=replies)
    assert found.questions == (Question((QUESTION, others[0]), (others[1], others[2]), "Mrs Doyle"),)


def test_what_the_model_knows_without_the_note_is_told_apart(interview):
    (found,) = interview(
        lists=[f"{QUESTION} Mrs Doyle"], replies={QUESTION: "Mrs Doyle"}, known={QUESTION: "Mrs Doyle, of course."}
    )
    assert not found.questions and [each.answer for each in found.known] == ["Mrs Doyle"]


@pytest.mark.parametrize(
    "line",
    [
        "Who repaired it? Mr Smith",  # not in the note
        "Is Mrs Doyle who brought it in? Mrs Doyle",  # given away
        "Mrs Doyle brought it in.",
        f"{QUESTION}",
        "? Mrs Doyle",
        f"What stands in the note? {NOTE.split(chr(10))[-1] * 2}",
        "",
    ],
)
def test_what_is_no_question_with_its_answer_is_not_used(interview, line):
    (found,) = interview(lists=[line], replies={"?": "Mrs Doyle Mr Smith"})
    assert found == Interviewed((), (), 0)


def test_lists_may_be_numbered_marked_or_in_another_language(interview):
    note = "Ottilie kommt am 3. Juli. Brought in by hand. 東京で会う。"
    lists = ["(1) Wann kommt Ottilie? 3. Juli\n* Wer kommt am 3. Juli? Ottilie\nどこで会う？ 東京"]
    replies = {"Wann kommt": "Am 3. Juli", "Wer kommt": "Ottilie", "どこで": "東京"}
    (found,) = interview([note], lists=lists, replies=replies)
    assert [each.answer for each in found.questions] == ["3. Juli", "Ottilie", "東京"]


def test_long_notes_are_asked_about_in_parts_and_too_long_paragraphs_not_at_all(tokenizer):
    model = Model(tokenizer)
    paragraphs = [f"{number} times the hen laid an egg in the barn. " * 6 for number in range(16)]
    too_long = "There is no end to this. " * 500
    Interview(tokenizer, model, 4096).about(["\n\n".join([*paragraphs, too_long])])
    assert model.num_lists > 2
    assert all(any(paragraph.strip() in prompt for prompt in model.prompts) for paragraph in paragraphs)
    assert not any("There is no end" in prompt for prompt in model.prompts)


def test_a_short_context_or_an_empty_note_asks_nothing(interview):
    assert interview(longest=64) == interview([""]) == [Interviewed((), (), 0)]


def test_a_model_without_a_chat_template_is_asked_in_a_plain_format():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    model = Model(tokenizer, lists=[f"{QUESTION} Mrs Doyle"], replies={QUESTION: "Mrs Doyle"})
    (found,) = Interview(tokenizer, model, 1024).about([NOTE])
    assert [each.answer for each in found.questions] == ["Mrs Doyle"]
    assert model.prompts[0].count("Question:") == 2 and model.prompts[0].endswith("Answer:")


def test_a_control_token_in_a_message_is_not_asked_about(interview, tokenizer):
    lists, replies = [f"{QUESTION} Mrs Doyle"], {QUESTION: "Mrs Doyle"}
    assert interview([NOTE], lists=lists, replies=replies)[0].num_written == 1
    assert interview([f"{NOTE} {tokenizer.eos_token}"], lists=lists, replies=replies)[0].num_written == 0


# --------------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def cache(tmp_path):
    return InterviewCache(tmp_path / "questions", b"salt", "model")


ABLE = {
    "lists": [f"{QUESTION} Mrs Doyle\nWhat is the repair? £85"] * 99,
    "replies": {QUESTION: "Mrs Doyle", "What is the repair?": "£85"},
}


def ask(tokenizer, cache, texts=(NOTE,), **model):
    made = Model(tokenizer, **ABLE | model)
    events = []
    numbered = dict(enumerate(texts))
    return interview_about(numbered, Interview(tokenizer, made, 1024), cache, Progress(events.append)), made, events


def test_a_note_is_asked_about_once(tokenizer, cache):
    first, _, events = ask(tokenizer, cache, [NOTE, NOTE])
    again, model, _ = ask(tokenizer, cache)
    assert first[0] == first[1] == again[0] and not model.prompts
    assert {event.stage for event in events} == {"interviewing"} and events[-1].done == events[-1].total == len(NOTE)
    assert all(isinstance(event, PreparationProgress) for event in events)


def test_changed_notes_and_other_models_are_asked_again(tokenizer, cache):
    ask(tokenizer, cache)
    assert ask(tokenizer, cache, [NOTE + " "])[1].prompts
    assert ask(tokenizer, dataclasses.replace(cache, model="another"))[1].prompts
    assert ask(tokenizer, dataclasses.replace(cache, salt=b"other"))[1].prompts


@pytest.mark.parametrize("content", ["", "[]", "{", '{"questions": 1}', '{"questions": [{}], "known": []}', "\udcff"])
def test_a_damaged_file_is_written_anew(tokenizer, cache, content):
    ask(tokenizer, cache)
    (file,) = cache.folder.iterdir()
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    found, model, _ = ask(tokenizer, cache)
    assert model.prompts and found[0].questions
    assert json.loads(file.read_text())["num_written"] == 2


def test_an_interruption_keeps_what_was_written_before(tokenizer, cache):
    texts = [f"{NOTE} Number {number}." for number in range(20)]
    model = Model(tokenizer, **ABLE)

    def stop_later(prompts, max_new_tokens):
        if model.num_lists > 32:
            raise KeyboardInterrupt
        return model(prompts, max_new_tokens)

    with pytest.raises(KeyboardInterrupt):
        interview_about(dict(enumerate(texts)), Interview(tokenizer, stop_later, 1024), cache, Progress())
    _, again, _ = ask(tokenizer, cache, texts)
    assert again.num_lists == 8


def test_a_model_that_is_not_able_is_not_asked_about_more_documents(tokenizer, cache):
    texts = [f"{NOTE} Number {number}." for number in range(40)]
    found, model, events = ask(tokenizer, cache, texts, replies={QUESTION: "Mrs Doyle"})
    assert set(found) == set(range(16)) and model.num_lists == 32 and events[-1].done == events[-1].total
    assert not is_able(found.values())
    assert len(ask(tokenizer, cache, texts[16:])[0]) == 24


def test_files_are_private_and_go_after_three_months_unread(tokenizer, cache):
    ask(tokenizer, cache, [NOTE, NOTE + " Old."])
    old, new = sorted(cache.folder.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (cache.folder, old, new))
    os.utime(old, (1e9, 1e9))
    cache.delete_unread()
    assert not old.exists() and new.exists()


def test_a_folder_that_cannot_be_written_is_said(tokenizer, tmp_path):
    (tmp_path / "questions").write_text("a file")
    with pytest.raises(StorageError, match="Cannot write to"):
        ask(tokenizer, InterviewCache(tmp_path / "questions", b"salt", "model"))


def test_a_small_part_of_what_the_model_knows_is_trained_on():
    new, known = (tuple(Question((f"{kind} {n}?",), (), "x") for n in range(10)) for kind in ("New", "Known"))
    chosen = to_train({3: Interviewed(new, (), 10), 7: Interviewed((), known, 10), 8: Interviewed((), (), 0)}, seed=0)
    assert chosen[3] == list(new) and set(chosen[7]) < set(known) and not chosen[8]
    assert len(chosen[7]) == round(KNOWN_SHARE * 10)
    assert to_train({7: Interviewed((), known, 10)}, seed=0) == {7: []}
