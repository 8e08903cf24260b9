"""Words are counted from a test's logits as `complete` guesses them, and keystrokes as it saves them, on every path."""

import dataclasses
import inspect
import math
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from builders import WORDS, evaluated
from failing_memory import CPU, recovering_learner, uneven_examples
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sebp_edge import Personalizer
from sebp_edge.engine.models.completion import complete_text
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training import run
from sebp_edge.engine.training.comparison import compare_words, t_quantile
from sebp_edge.engine.training.evaluation import HeldOutLoss, evaluate
from sebp_edge.engine.training.keystrokes import MIN_PROBABILITY, MOST_BYTES
from sebp_edge.engine.training.scoring import scoring
from sebp_edge.engine.training.words import WordReader
from sebp_edge.events import silent
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.prompts import encode_texts
from sebp_edge.serve.messages import CompleteParams
from sebp_edge.values.documents import Document
from sebp_edge.values.example import Example

WORD = re.compile(r"[a-z]*")


@pytest.fixture
def sure(base):
    """A random model that is sure of what it predicts."""
    base.model.model.norm.weight.data *= 12
    return base


def reader_of(base):
    return WordReader(base.vocabulary, CPU)


class Typist:
    """Completes texts after each space."""

    def __init__(self, base):
        self._complete = partial(
            complete_text, Decoder(base.model), base.vocabulary, partial(encode_texts, tokenizer=base.tokenizer)
        )

    def guess(self, before):
        """The likeliest word."""
        return WORD.match(self._complete(before, 12, 0.0).text)[0]


def begins_with_space(base, word):
    (tokens,) = base.tokenizer([f"a {word}"], add_special_tokens=False)["input_ids"]
    return len(base.vocabulary[tokens[1]]) > 1


def text_of(base, typist, order):
    """A text of words, of which the model has guessed some, with signs between them."""
    text = order.choice(WORDS)
    for _ in range(18):
        text += order.choice([" ", " ", " ", " ", ", ", ".\n"])
        guess = typist.guess(text) if text.endswith(" ") and order.random() < 0.7 else ""
        text += guess if guess and begins_with_space(base, guess) else order.choice(WORDS)
    return text + "."


@pytest.mark.slow
def test_the_counts_are_those_of_completing_after_each_space(sure):
    typist, order = Typist(sure), random.Random()
    texts = [text_of(sure, typist, order) for _ in range(2)]
    examples, _ = encode([Document("", text) for text in texts], sure.tokenizer, 128)
    assert len(examples) == len(texts)
    collator = Collator(128, sure.pad_token_id)
    with scoring(sure.model, examples, collator, CPU, silent, words=reader_of(sure)) as losses:
        found = losses()
    for number, text in enumerate(texts):
        expected = {"words": 0, "guessed": 0}
        for space in re.finditer(r"(?<=\S) (?=[a-z])", text):
            word = WORD.match(text, space.end())[0]
            assert begins_with_space(sure, word)
            expected["words"] += 1
            expected["guessed"] += typist.guess(text[: space.end()]) == word
        counted = {name: getattr(found, name)[number] for name in expected}
        assert counted == expected, text
        assert found.characters[number] == len(text)
    assert sum(found.words.values()) > sum(found.guessed.values()) > 0 < sum(found.saved.values())


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("path", ["hoisted", "padded", "graphs"])
@pytest.mark.parametrize("max_rows", [64, 4096])
def test_losses_and_words_are_the_same_on_every_path(sure, path, max_rows):
    examples = uneven_examples()
    with recovering_learner(sure, examples, max_rows=max_rows, padded=path == "padded", words=reader_of(sure)) as own:
        if path == "graphs":
            own.plain.begin_graphs()
        alone = evaluate(own, evaluated(own, examples))
        found = evaluate(own, evaluated(own, examples), reads_words=True)
    assert alone.words == {} and alone.tokens == found.tokens
    assert found.nats == pytest.approx(alone.nats, rel=1e-5)
    with recovering_learner(sure, examples, words=reader_of(sure)) as own:
        expected = evaluate(own, evaluated(own, examples), reads_words=True)
    for name in ("words", "characters", "guessed", "saved"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.usefixtures("plain_graphs")
def test_a_test_is_captured_apart_from_evaluations_without_words(sure):
    examples = uneven_examples()
    with recovering_learner(sure, examples, words=reader_of(sure)) as own:
        own.plain.begin_graphs()
        group = evaluated(own, examples)
        own.plain.plan_graphs([], [], group.micro_batches)
        for reads_words in (True, False, True):
            evaluate(own, group, reads_words=reads_words)
        order = own.plain.graphs._graphs.order
    assert [part for part in order if part != "warm_up"] == ["words", "losses"]


class Characters:
    """A vocabulary in which each token is a text."""

    def __init__(self, *tokens):
        self.tokens = [token if token is None else token.encode() for token in tokens]

    def __getitem__(self, number):
        return self.tokens[number]

    def going_on_after(self, character):
        return torch.tensor([float(token is not None and token[:1].isalpha()) for token in self.tokens])

    def beginning_with(self, prefix):
        return [number for number, token in enumerate(self.tokens) if token is not None and token.startswith(prefix)]

    def beginnings(self, most):
        return [torch.zeros(len(self.tokens), *shape, dtype=torch.int64) for shape in ((), (most,), (most,))]


TOKENS = [None, " the", "re", " ferry", ".", " ", "\n", "six", "-ry", " é"]
SURE, UNSURE = [0.0, 1.0, 1.0, 0.0, 0.0], [math.inf, 0.0, 0.0, 0.0, 0.0]
TYPED = [1.0] * (1 + 2 * MOST_BYTES)


def count(labels, rows=None, flags=b"", prompt=(4,)):
    """What is counted: characters, saved, words, guessed."""
    example = Example([*prompt, *map(abs, labels)], [-100] * len(prompt) + labels, 0)
    rows = [SURE] * example.num_loss_tokens if rows is None else rows
    return WordReader(Characters(*TOKENS), CPU).count(example, torch.tensor([row + TYPED for row in rows]), flags)


def words_of(*arguments, **options):
    found = count(*arguments, **options)
    return found.characters, found.words, found.guessed


@pytest.mark.parametrize(
    ("labels", "counted"),
    [
        ([1, 4], (5, 1, 1)),
        ([1, 2, 4], (7, 1, 1)),
        ([1, 3, 4], (11, 2, 2)),
        ([1, 0], (4, 1, 1)),  # the token that ends a text
        ([1], (4, 1, 0)),  # nothing tells whether the model would have ended the word
        ([1, -100, 4], (5, 1, 0)),
        ([7, 4], (4, 0, 0)),  # no space
        ([5, 7, 4], (5, 0, 0)),  # the space is a token of its own
        ([6, 1, 4], (6, 0, 0)),  # the space begins a line
        ([3, 8, 4], (10, 1, 1)),  # a sign ends the word
        ([9, 4], (3, 1, 1)),
    ],
)
def test_words_are_those_after_a_space(labels, counted):
    assert words_of(labels) == counted


def test_a_word_is_guessed_if_all_of_it_is_right_and_ends():
    labels, going_on = [1, 2, 4], [0.0, 1.0, 1.0, 1.0, 0.6]
    for wrong in range(2):
        assert words_of(labels, [UNSURE if row == wrong else SURE for row in range(3)]) == (7, 1, 0)
    assert words_of(labels, [SURE, SURE, going_on]) == (7, 1, 0)
    assert words_of(labels, [[math.nan] * 5] * 3) == (7, 1, 0)


def test_boilerplate_and_prompts_are_not_counted():
    assert words_of([1, 4, 3, 4], flags=bytes([1, 1, 0, 0])) == (7, 1, 1)
    assert words_of([3, 4], prompt=(4, 1, 4)) == (7, 1, 1)


def test_ghost_text_is_shown_from_the_probability_of_complete():
    default = inspect.signature(Personalizer.complete).parameters["min_probability"].default
    assert default == CompleteParams.min_probability == MIN_PROBABILITY


def test_a_tokenizer_whose_bytes_are_unknown_leaves_the_words_out(base):
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    tokenizer.decoder = decoders.WordPiece()
    unknown = dataclasses.replace(base, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    task = type("Task", (), {"dataset": type("Dataset", (), {"quiz": None})})
    assert run._word_reader(base, task) is not None
    assert run._word_reader(unknown, task) is None


# ------------------------------------------------------------------------------------------------------------ figures


def outcome(saved, guessed=None, characters=1000, words=100):
    documents = range(len(saved))
    guessed = saved if guessed is None else guessed
    every = ([10.0] * len(saved), [5] * len(saved)), ([characters] * len(saved), saved, [words] * len(saved), guessed)
    nats, tokens = (dict(zip(documents, part, strict=True)) for part in every[0])
    return HeldOutLoss(nats, tokens, {}, {}, *(dict(zip(documents, part, strict=True)) for part in every[1]))


def test_the_interval_is_that_of_t_for_documents_of_one_size():
    before, more = [30] * 8, np.array([4, 9, -2, 6, 8, 0, 5, 10])
    found = compare_words(outcome(before), outcome((before + more).tolist()), range(8))
    assert (found.keystrokes, found.saved_before, found.saved_after) == (8000, 240, 240 + more.sum())
    half = t_quantile(7, 0.9925) * (more / 1000).std(ddof=1) / math.sqrt(8)
    expected = ((more / 1000).mean() - half, (more / 1000).mean() + half)
    assert (found.saved_more_lowest, found.saved_more_highest) == pytest.approx(expected)
    assert (found.guessed_more_lowest, found.guessed_more_highest) == pytest.approx([10 * each for each in expected])


@pytest.mark.parametrize(
    ("after", "keys", "interval"),
    [
        ([40, 44, 38, 41], "96 of 100 keys, 97 before", r"between \d\.\d % and \d\.\d % more"),
        ([20, 16, 22, 19], "98 of 100 keys, 97 before", r"between \d\.\d % and \d\.\d % fewer"),
        (
            [31, 29, 36, 28],
            "96.9 of 100 keys, 97.0 before, which may be chance",
            r"from \d\.\d % fewer to \d\.\d % more",
        ),
    ],
)
def test_the_sentence_says_only_what_is_sure_and_the_interval_has_the_figures(after, keys, interval):
    found = compare_words(outcome([30] * 4), outcome(after), range(4))
    assert found.sentence == f"Typing your texts with its suggestions takes {keys}."
    assert replace(found, is_typed=False).sentence == ""
    assert re.fullmatch(interval, found.more_saved), found.more_saved
    assert found.guessed == (30, round(sum(after) / 4))
