"""A learning-rate range test finds where the loss falls, stops when it diverges, and leaves the model as it was."""

import json
import math
from itertools import pairwise

import pytest
import torch
from builders import make_sentences

from sebp_edge import AdapterStore
from sebp_edge.errors import MachineError, OptionError, TextsError
from sebp_edge.events import StepDone
from sebp_edge.research.lr_range import LearningRateRange, growing_rates
from sebp_edge.research.lr_sweep import DIVERGED, MEMORY, RangeStep

TEXTS = make_sentences(40)


def read(losses, planned=None):
    """What is read in these smoothed losses, at rates that double."""
    steps = [RangeStep(2.0**number, loss, loss) for number, loss in enumerate(losses)]
    return LearningRateRange.of("model", "recipe", 0, planned or len(losses), steps)


def falling(flat, falls, rises=0):
    """A loss of 4 that stays, falls by 0.1 a step, or by 0.3 in the middle, and rises again."""
    losses = [4.0] * flat
    for number in range(falls):
        losses.append(losses[-1] - (0.3 if falls // 2 - 5 <= number < falls // 2 + 5 else 0.1))
    return losses + [losses[-1] + number for number in range(1, rises + 1)]


def test_rates_grow_by_one_factor_between_the_bounds():
    rates = growing_rates(1e-5, 1e-1, 41)
    assert (len(rates), rates[0], rates[-1]) == (41, 1e-5, pytest.approx(1e-1))
    assert all(later / rate == pytest.approx(10**0.1) for rate, later in pairwise(rates))


@pytest.mark.parametrize(("lowest", "highest"), [(0, 1), (-1e-3, 1), (1, 1), (1e-2, 1e-3), (1e-3, math.inf), ("1", 2)])
def test_wrong_bounds_are_refused(lowest, highest):
    with pytest.raises(OptionError, match="expected two learning rates above 0, the lower one first"):
        growing_rates(lowest, highest, 50)


@pytest.mark.parametrize("steps", [19, 49, 0, -5, 60.5, "60"])
def test_a_number_of_steps_that_tells_nothing_is_refused(steps):
    with pytest.raises(
        OptionError, match="too few to tell; expected a whole number of at least 50 for rates from 1e-05"
    ):
        growing_rates(1e-5, 1, steps)


def test_a_narrow_range_takes_fewer_steps():
    assert len(growing_rates(1e-4, 1e-2, 20)) == 20
    with pytest.raises(OptionError, match="at least 20"):
        growing_rates(1e-4, 1e-3, 19)


def test_the_three_rates_are_where_the_loss_begins_to_fall_falls_most_and_is_lowest():
    found = read(falling(30, 20, rises=3))
    begin, steepest, lowest = (math.log2(rate) for rate in (found.begins, found.steepest, found.lowest))
    assert 29 <= begin <= 33
    assert steepest == 30 - 1 + 10  # the middle of the steep part
    assert lowest == 49
    assert found.summary.endswith(f"Try learning rates from {found.begins:.1e} to {found.steepest:.1e}.")


def test_the_first_losses_which_are_averages_of_few_do_not_count():
    noisy = [9.0, 2.0, 7.0, *falling(30, 20)[3:]]
    assert read(noisy).begins == read(falling(30, 20)).begins


@pytest.mark.parametrize("losses", [[4.0] * 60, [4.0 - 0.001 * number for number in range(60)]])
def test_no_rate_is_suggested_if_the_loss_does_not_fall(losses):
    found = read(losses)
    assert (found.begins, found.steepest, found.lowest) == (None, None, None)
    assert "does not fall at any learning rate tested" in found.summary


@pytest.mark.parametrize("losses", [[4.0] * 5, []])
def test_a_test_that_diverges_at_once_says_that_it_cannot_tell(losses):
    assert f"diverged after {len(losses)} steps, too few to tell" in read(losses, planned=60).summary


def test_a_test_that_ends_early_says_that_it_diverged():
    assert read(falling(30, 20), planned=80).diverged
    assert "it then diverges" in read(falling(30, 20), planned=80).summary
    assert not read(falling(30, 20)).diverged


# --------------------------------------------------------------------------------------------------------- Personalizer


def weights_of(personalizer):
    model = personalizer.in_use.base.model
    return {name: weight.clone() for name, weight in model.state_dict().items()}, [*dict(model.named_modules())]


@pytest.mark.slow
def test_the_model_is_unchanged_and_the_loss_falls_then_diverges(make):
    """With all weights, since an adapter of a random model learns little and never diverges."""
    events = []
    personalizer = make(on_event=events.append)
    personalizer.recipe = personalizer.in_use.recipe = personalizer.recipe.replace(method="full")
    personalizer.generate("the ferry", max_new_tokens=1)
    before, modules = weights_of(personalizer)
    found = personalizer.lr_range(TEXTS, lowest=1e-3, highest=1e3, steps=60)
    after, modules_after = weights_of(personalizer)
    assert modules == modules_after
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert not any(weight.grad is not None for weight in personalizer.in_use.base.model.parameters())
    assert found.diverged
    assert found.begins <= found.steepest <= found.lowest < found.steps[-1].learning_rate
    smoothed = [step.smoothed for step in found.steps]
    assert all(loss <= DIVERGED * min(smoothed[: number + 1]) for number, loss in enumerate(smoothed[:-1]))
    average = 0.0
    for number, step in enumerate(found.steps, start=1):
        average = MEMORY * average + (1 - MEMORY) * step.loss
        assert step.smoothed == pytest.approx(average / (1 - MEMORY**number))
    done = [event for event in events if isinstance(event, StepDone)]
    assert [event.learning_rate for event in done] == [step.learning_rate for step in found.steps]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_test_and_an_adapter_in_use_stays(make, after_learning, tmp_path):
    first = make().lr_range(TEXTS, lowest=1e-2, steps=20)
    record = json.loads(json.dumps(first.to_dict()))
    assert (record["event"], record["model"], record["planned_steps"]) == ("lr_range", "micro-llama", 20)
    assert record["steps"][0] == {"learning_rate": 1e-2, "loss": first.steps[0].loss, "smoothed": first.steps[0].loss}
    personalizer = make(store=after_learning(AdapterStore(tmp_path / "learnt" / "store")))
    adapted = personalizer.generate("the ferry", temperature=0, max_new_tokens=8)
    assert personalizer.lr_range(TEXTS, lowest=1e-2, steps=20) == first
    assert personalizer.generate("the ferry", temperature=0, max_new_tokens=8) == adapted
    assert personalizer.store.names() == ["default"]


@pytest.mark.slow
def test_a_budget_is_kept_or_refused_before_anything_is_loaded(make):
    with pytest.raises(MachineError, match="needs at least"):
        make(memory_budget="20MB").lr_range(TEXTS)
    assert len(make(memory_budget="8GB").lr_range(TEXTS, lowest=1e-2, steps=20).steps) == 20


def test_texts_without_tokens_are_refused(make):
    with pytest.raises(TextsError):
        make().lr_range([" "])


def test_running_out_of_memory_is_one_sentence(make):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    personalizer = make()
    personalizer.generate("the ferry", max_new_tokens=1)
    personalizer.in_use.base.model.register_forward_pre_hook(run_out)
    with pytest.raises(MachineError, match="Out of CPU memory while training; choose a smaller model"):
        personalizer.lr_range(TEXTS)
