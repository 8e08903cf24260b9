"""The longest copy is what greedy decoding brings back from a document's own beginnings, and boilerplate is skipped."""

import functools

import pytest
import torch
from builders import make_examples, make_sentences, unchanged
from failing_memory import CPU, RECIPE

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import attach
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import Schedule, shuffled_batches
from sebp_edge.engine.training import copies as module
from sebp_edge.engine.training.copies import longest_copies, longest_run
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.events import ExamplesEvaluated, silent
from sebp_edge.lessons.examples import encode
from sebp_edge.values.documents import Document
from sebp_edge.values.example import Example, outlines
from sebp_edge.values.training_facts import Copied

MEMORISED = RECIPE.replace(method="full", learning_rate=3e-2, epochs=40, batch_tokens=80)


@pytest.fixture(scope="module")
def memorised(model_folder):
    """A model that has learnt two of four short documents almost by heart, and the examples of all four."""
    base = load_base_model(resolve(model_folder), MEMORISED, CPU)
    documents = [Document("", text) for text in make_sentences(4, words=12)]
    examples, _ = encode(documents, base.tokenizer, 64)
    adaptation, collator = attach(base, MEMORISED, 0), Collator(64, base.pad_token_id)
    schedule = Schedule(shuffled_batches(outlines(examples[:2]), MEMORISED.batch_tokens, MEMORISED.epochs, 0))
    with RecoveringLearner(adaptation, MEMORISED, examples, collator, silent) as learner:
        learner.prepare(schedule)
        Trainer(learner, MEMORISED, silent, "train").train(schedule)
    return base, adaptation, examples


@pytest.fixture
def warn_from(monkeypatch):
    """A function that sets from how many tokens on a run counts as long."""
    return functools.partial(monkeypatch.setattr, module, "MIN_WARNED_RUN")


@pytest.fixture
def all_runs(warn_from):
    """Makes every run count as long."""
    warn_from(0)


def copies_of(base, adaptation, examples, seed=0, on_event=silent, *options):
    """The copies among at most 200 tokens, with the numbers of documents as their names."""
    return longest_copies(base, adaptation, examples, range(100), seed, 200, on_event, *options)


def longest_by_decoding(model, example):
    """The longest run over all beginnings, with a generation for each."""
    ids, longest = example.input_ids, 0
    for length in range(1, len(ids)):
        prompt = torch.tensor([ids[:length]])
        options = {"max_new_tokens": len(ids) - length, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        new = model.generate(prompt, **options)[0, length:].tolist()
        run = next((n for n, (a, b) in enumerate(zip(new, ids[length:], strict=False)) if a != b), len(new))
        longest = max(longest, run)
    return longest


@pytest.mark.slow
def test_a_run_is_what_greedy_decoding_brings_back(memorised, all_runs):
    base, adaptation, examples = memorised
    copies = copies_of(base, adaptation, examples)
    assert [copy.run for copy in copies] == sorted((copy.run for copy in copies), reverse=True)
    assert len(copies) == 4 and copies[0].run > 10
    for copy in (copies[0], copies[-1]):
        assert copy.run == longest_by_decoding(base.model, examples[copy.document])
    with adaptation.disabled():
        assert copies[0].base_run == longest_by_decoding(base.model, examples[copies[0].document])


@pytest.mark.slow
def test_what_was_learnt_is_copied_and_the_rest_is_not(memorised, all_runs):
    copies = {copy.document: copy for copy in copies_of(*memorised)}
    assert min(copies[0].run, copies[1].run) > 2 * max(copies[2].run, copies[3].run)
    assert max(copy.base_run for copy in copies.values()) < 4


@pytest.mark.slow
def test_boilerplate_neither_counts_nor_ends_a_run(memorised, all_runs):
    base, adaptation, examples = memorised
    (whole,) = copies_of(base, adaptation, examples[:1])
    # A token in the middle of what is learnt by heart is another one.
    ids, labels = (list(each) for each in (examples[0].input_ids, examples[0].labels))
    labels[len(labels) // 2] = 5
    changed = [Example(ids, labels, 0)]
    (broken,) = copies_of(base, adaptation, changed)
    flags = bytes(position == len(labels) // 2 for position in range(len(labels)))
    (skipped,) = copies_of(base, adaptation, [Example(ids, labels, 0, flags)])
    assert broken.run < skipped.run == whole.run - 1


@pytest.mark.parametrize(
    ("predicted", "labels", "skipped", "longest"),
    [
        ([1, 2, 3, 4], [1, 2, 9, 4], [False] * 4, 2),
        ([1, 4], [1, -100, -100, 4], [False] * 4, 1),
        ([1, 7, 3, 4], [1, 2, 3, 4], [False, True, False, False], 3),
        ([1, 2, 3, 4], [1, 2, 3, 4], [False, True, True, False], 2),
        ([7, 7], [1, 2], [False] * 2, 0),
        ([1, 3, 4], [1, -100, 3, 4], [False, True, False, False], 3),
        ([], [], [], 0),
    ],
)
def test_the_longest_run(predicted, labels, skipped, longest):
    assert longest_run(predicted, labels, skipped) == longest


@pytest.mark.parametrize(
    ("run", "base_run", "is_learnt"), [(32, 0, True), (32, 16, False), (33, 16, True), (400, 300, False)]
)
def test_it_warns_of_long_runs_that_are_not_the_base_models(run, base_run, is_learnt):
    assert Copied("", run, base_run).is_learnt == is_learnt


def test_examples_are_drawn_by_the_seed_up_to_a_number_of_tokens(base, all_runs):
    examples, adaptation = make_examples([10] * 40), attach(base, RECIPE, 0)

    def documents(seed, examples=examples):
        return {copy.document for copy in copies_of(base, adaptation, examples, seed)}

    assert len(documents(0)) == 20
    assert documents(0) == documents(0) != documents(1)
    assert len(documents(0, make_examples([220, 220]))) == 1


@pytest.mark.slow
def test_it_can_be_stopped_after_each_micro_batch_and_leaves_the_model_as_it_was(memorised, all_runs):
    base, adaptation, examples = memorised
    events = []

    def stop_at(event):
        events.append(event)
        if len(events) == 6:
            raise StopRequested

    with unchanged(base.model), pytest.raises(StopRequested):
        copies_of(base, adaptation, examples, 0, stop_at, MemoryOptions(max_rows=1))
    assert events == [ExamplesEvaluated(done, 4) for done in (1, 2, 3, 4, 1, 2)]
