"""`Personalizer.plan` plans without loading the model, and trainings follow their plan."""

import dataclasses
import importlib
import json
import shutil

import pytest
import torch
from builders import save_model
from memory_plans import RECIPE, all_plans
from transformers import BloomConfig

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.errors import MachineError, OptionError, TextsError
from sebp_edge.events import JobProgress, JobStarted, MemoryPlanned, ModelLoaded, PreparationProgress, StepDone
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.work_ahead import Pace, loading, phases_ahead


@pytest.fixture
def without_weights(two_layer_folder, tmp_path):
    """A copy of the model's folder that cannot be loaded."""
    folder = shutil.copytree(two_layer_folder, tmp_path / "micro-llama")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def make(two_layer_folder, tmp_path):
    def personalizer(**options):
        options = {"recipe": RECIPE, "device": "cpu", "store": AdapterStore(tmp_path / "store")} | options
        return Personalizer(options.pop("model", two_layer_folder), **options)

    return personalizer


def test_a_plan_loads_nothing(make, notes_folder, without_weights):
    plan = make(model=without_weights, memory_budget="4GB").plan(notes_folder)
    assert (plan.model, plan.device, plan.chosen.dtype) == ("micro-llama", "cpu", "float32")
    assert plan.chosen.recipe == RECIPE.with_defaults()
    assert plan.budget == 4_000_000_000
    assert 0 < plan.chosen.peak < 4e9
    assert plan.chosen.seconds > 0
    # Without a budget, the free memory is the budget.
    assert make().plan(notes_folder).budget > plan.chosen.footprint.context


@pytest.mark.slow
def test_a_plan_for_an_absent_gpu_does_not_depend_on_this_machine(make, notes_folder, machine):
    plan = make(model="llama-3.2-3b").plan(notes_folder, gpu="8GB")
    machine.multiplies(1e9)
    machine.has_memory(1e6)
    machine.computes_in(torch.float16)
    assert make(model="llama-3.2-3b").plan(notes_folder, gpu="8GB").to_dict() == plan.to_dict()
    assert (plan.device, plan.gpu, plan.budget, plan.requested_budget) == ("cuda", 8 * 10**9, 8 * 10**9, None)
    assert (plan.chosen.dtype, plan.chosen.seconds) == ("bfloat16", None)
    assert plan.chosen.footprint.weights == 2 * 3_212_749_824
    assert plan.chosen.peak <= 8e9
    assert {other.seconds for other in (plan.larger, plan.smaller) if other} == {None}
    assert json.loads(json.dumps(plan.to_dict()))["gpu"] == 8 * 10**9
    assert make(model="llama-3.2-3b", memory_budget="9GB").plan(notes_folder, gpu=24 * 10**9).budget == 9 * 10**9


@pytest.mark.parametrize("gpu", ["8 hectares", 0, -1, True])
def test_an_invalid_gpu_size_raises_one_sentence(make, notes_folder, gpu):
    with pytest.raises(OptionError, match=r"memory is .*, but must be (a size with a unit|a number of bytes)"):
        make().plan(notes_folder, gpu=gpu)
    with pytest.raises(OptionError, match=r"^The memory budget is 9\.0 GB, but the GPU has 8\.0 GB"):
        make(memory_budget="9GB").plan(notes_folder, gpu="8GB")


def test_a_model_that_does_not_fit_is_not_loaded(make, notes_folder, without_weights):
    events = []
    with pytest.raises(MachineError, match="the memory budget is 1 MB"):
        make(model=without_weights, memory_budget="1MB", on_event=events.append).adapt(notes_folder)
    assert all(isinstance(event, JobStarted | PreparationProgress | JobProgress) for event in events)


def test_texts_that_exceed_the_budget_are_refused_unread(make, tmp_path, process_memory):
    # Read, it would be refused as no text.
    (tmp_path / "notes.txt").write_bytes(bytes(4_400_000))
    for attempt in (make(memory_budget="100MB").adapt, make(memory_budget="100MB").plan):
        with pytest.raises(MachineError, match="Reading these texts would take more than"):
            attempt(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["the ferry left", " "])
def test_too_little_text_is_refused_before_planning(make, text):
    for attempt in (make().plan, make(memory_budget="4GB").adapt):
        with pytest.raises(TextsError):
            attempt([text])


@pytest.mark.slow
@pytest.mark.usefixtures("process_memory")
def test_a_model_that_runs_padded_is_planned_with_whole_sequences(make, notes_folder, tmp_path):
    save_model(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=320), tmp_path / "bloom")
    plan = make(model=tmp_path / "bloom", memory_budget="4GB").plan(notes_folder)
    while plan.smaller is not None:
        plan = make(model=tmp_path / "bloom", memory_budget=plan.chosen.peak - 1).plan(notes_folder)
    assert RECIPE.context_length <= plan.chosen.options.max_rows < 2 * RECIPE.context_length
    assert plan.chosen.options.checkpoints == 0


def test_an_invalid_budget_is_refused_at_once(make):
    with pytest.raises(OptionError, match="'8 hectares'"):
        make(memory_budget="8 hectares")


@pytest.mark.slow
@pytest.mark.usefixtures("process_memory", "unassessed")
def test_a_training_runs_the_planned_micro_batches_and_the_same_steps(make, notes_folder, micro_batches, monkeypatch):
    def adapt(**options):
        micro_batches.clear()
        events = []
        make(on_event=events.append, **options).adapt(notes_folder)
        left_out = JobStarted | PreparationProgress | JobProgress
        events = [event for event in events if not isinstance(event, left_out)]
        return events, max(sum(example.num_active_tokens for example in batch) for batch in micro_batches)

    events, most = adapt()
    steps = [event for event in events if isinstance(event, StepDone)]
    assert not any(isinstance(event, MemoryPlanned) for event in events)
    # From a budget on in which a batch is cut.
    plans = all_plans(lambda size: make(memory_budget=size).plan(notes_folder), 10**6)
    # The smallest plan with the same precision.
    smallest = [plan.chosen for plan in plans if not plan.chosen.options.moments_in_8_bits][-1]
    assert smallest.options.checkpoints == 1
    handles = []
    attach = Hoisted.__init__
    monkeypatch.setattr(
        Hoisted,
        "__init__",
        lambda handle, *arguments, **options: handles.append(options) or attach(handle, *arguments, **options),
    )
    planned_events, planned_most = adapt(memory_budget=smallest.peak)
    options = {"checkpoints": 1, "offload": False, "chunked_blocks": False, "dequantised_blocks": 0}
    # Handles without options are those of small copies.
    (*_, given) = (given for given in handles if given)
    assert given.pop("check") is not None
    assert given == options | {"max_logits": smallest.options.max_logits}
    assert isinstance(planned_events[0], MemoryPlanned)
    assert isinstance(planned_events[1], ModelLoaded)
    assert (planned_events[0].description, planned_events[0].max_rows) == (
        smallest.description,
        smallest.options.max_rows,
    )
    assert "activations of 1 block recomputed" in smallest.description
    assert sum(planned_events[0].footprint.values()) == planned_events[0].peak
    assert planned_most <= smallest.options.max_rows < most
    for step, other in zip(steps, (e for e in planned_events if isinstance(e, StepDone)), strict=True):
        assert other.loss == pytest.approx(step.loss, rel=1e-4)


@pytest.mark.slow
def test_with_a_budget_texts_are_still_encoded_and_laid_out_once(make, notes_folder, monkeypatch):
    calls = []
    for name in ("lessons.examples.tokenise", "engine.sparse.rows.schedule.shuffled_batches"):
        module, _, function = name.rpartition(".")
        module = importlib.import_module(f"sebp_edge.{module}")
        original = getattr(module, function)

        def counted(*given, original=original, name=name, **options):
            calls.append(name)
            return original(*given, **options)

        monkeypatch.setattr(module, function, counted)
    make().adapt(notes_folder)
    without = sorted(calls)
    calls.clear()
    make(memory_budget="4GB").adapt(notes_folder)
    assert sorted(calls) == without


@pytest.mark.slow
@pytest.mark.usefixtures("process_memory", "unassessed")
def test_the_adapter_records_the_values_that_the_plan_chose(make, notes_folder):
    recipe = dataclasses.replace(RECIPE, r=None, learning_rate=2e-2)
    plans = all_plans(lambda size: make(recipe=recipe, memory_budget=size).plan(notes_folder), 600_000)
    smallest = plans[-1].chosen
    assert (smallest.recipe.r, smallest.recipe.lora_alpha, smallest.options.moments_in_8_bits) == (4, 8, True)
    personalizer = make(recipe=recipe, memory_budget=smallest.peak)
    result = personalizer.adapt(notes_folder)
    assert result.passed
    record = personalizer.load_adapter("default").recipe
    assert (record["r"], record["lora_alpha"], record["load_in_4bit"]) == (4, 8, False)


def test_replies_of_streamed_blocks_take_a_copy_for_each_token_of_a_batch():
    assert Pace(1e-9, copying=0.1, num_decoded=8).decoding([10] * 17, 48) == pytest.approx(3 * 48 * 0.1)
    assert Pace(1.0).decoding([10] * 17, 48) == 17 * 10 + 48 * 17


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "ask"])
def test_the_time_of_a_plan_is_that_of_all_phases(make, notes_folder, recipe):
    """As the progress of the training tells it: with general text and the quiz, if the recipe has them."""
    call = make(recipe=recipe, model="tiny")._make_call(StopSignal(), Interruptions())
    planned = Preparation(*call.with_texts(None if recipe else notes_folder)).plan(call.conditions())
    dataset, chosen = planned.prepared.dataset, planned.plan.chosen
    ahead = phases_ahead(dataset, planned.schedules, chosen.recipe, planned.pace, num_earlier=0)
    phases = [loading(chosen), *ahead]
    assert chosen.seconds == pytest.approx(sum(sum(phase.seconds.values()) for phase in phases))
    names = {phase.name for phase in phases}
    assert {"general text", "copies", "saving"} <= names
    assert ({"replies", "teacher", "quiz before", "quiz"} <= names) == (recipe == "ask")
