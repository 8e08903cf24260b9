"""The plan for a memory budget is the first choice that fits, and the fastest."""

import dataclasses
import json
from itertools import groupby, pairwise

import pytest
from builders import IGNORE, dataset_of
from memory_plans import CPU, CUDA, RECIPE, all_plans, candidates, choices_3b, make_dataset, plan_3b, plan_of

from sebp_edge import Recipe
from sebp_edge.engine.memory import choosing
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_options import FASTEST
from sebp_edge.engine.memory.prediction import num_states_kept
from sebp_edge.engine.memory.seconds import SECONDS_PER_LAYER
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.memory.this_machine import target_of
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import MachineError
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_first_choice_that_fits_is_taken_and_its_neighbours_are_reported(shape_3b):
    dataset, shape = make_dataset(20), shape_3b.with_blocks(shape_3b.blocks[:6])
    plans = all_plans(lambda size: plan_3b(shape, size, dataset), "80GB")
    assert (plans[0].chosen.options, plans[0].larger) == (FASTEST, None)
    assert len(plans) > 8
    assert all(smaller.chosen.peak < larger.chosen.peak for larger, smaller in pairwise(plans))
    # A budget of exactly the peak is enough.
    for plan in plans[1::5]:
        assert plan_3b(shape, plan.chosen.peak, dataset).chosen == plan.chosen
    # Choices with streamed blocks stream as few as fit.
    plans = [plan for plan in plans if not plan.chosen.options.streamed_blocks]
    for larger, smaller in pairwise(plans):
        assert smaller.chosen == larger.smaller
        assert smaller.larger == larger.chosen
    found = list(choosing._ever_smaller(choices_3b(shape, dataset, RECIPE)))
    assert [plan.chosen for plan in plans] == [each for each in found if not each.options.streamed_blocks]


@pytest.mark.slow
@pytest.mark.usefixtures("has_bitsandbytes")
def test_plans_get_slower_before_they_get_less_precise(shape_3b):
    recipe = RECIPE.replace(batch_tokens=2000)
    recipe = dataclasses.replace(recipe, r=None)
    # These are all that some budget chooses.
    found = list(choosing._ever_smaller(choices_3b(shape_3b, make_dataset(80), recipe)))
    chosen = [each for each in found if not each.options.streamed_blocks]
    streamed = found[len(chosen) :]
    assert all(each.options.streamed_blocks and each.recipe.load_in_4bit for each in streamed)
    precision = [(each.recipe.r, not each.options.moments_in_8_bits) for each in streamed]
    assert precision == sorted(precision, reverse=True) and {r for r, _ in precision} == {16, 8, 4}
    precision = [(not each.options.moments_in_8_bits, not each.recipe.load_in_4bit, each.recipe.r) for each in chosen]
    assert precision == sorted(precision, reverse=True)
    assert precision[0] == (True, True, 16)
    assert precision[-1] == (False, False, 4)
    for _, alike in groupby(zip(precision, chosen, strict=True), key=lambda pair: pair[0]):
        seconds = [each.seconds for _, each in alike]
        assert seconds == sorted(seconds)
    assert {each.recipe.lora_alpha / each.recipe.r for each in chosen} == {2}
    # All descriptions differ.
    assert len({each.description for each in found}) == len(found)
    # Plans save activations by checkpoints and by smaller micro-batches; the fastest plan does neither.
    assert not chosen[0].options.small_buffers
    assert {each.options.checkpoints for each in chosen} >= {0, 14, 27}
    assert len({each.options.max_rows for each in chosen}) > 2


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_host_memory_of_a_training_on_a_gpu_must_fit_too(shape_3b, machine):
    full, weights = RECIPE.replace(method="full"), 2 * shape_3b.parameters
    chosen = plan_3b(shape_3b, "16GB", recipe=full).chosen
    assert chosen.options.offload
    assert 3 * weights < chosen.host_memory < 3.1 * weights
    # Without room for the inputs, nothing is offloaded.
    machine.has_memory(3 * weights)
    slower = plan_3b(shape_3b, "16GB", recipe=full).chosen
    assert (slower.options.offload, slower.host_memory) == (False, 3 * weights)
    assert slower.seconds > chosen.seconds
    machine.has_memory(3 * weights - 1)
    with pytest.raises(
        MachineError, match=r"needs about 19,276,498,944 bytes .*943 bytes are free.* or train an adapter"
    ):
        plan_3b(shape_3b, "16GB", recipe=full)
    lora = plan_3b(shape_3b, "16GB")
    assert (lora.full, lora.chosen.host_memory) == (None, 5 * 4 * shape_3b.adapter_parameters(4))


def test_a_training_on_a_cpu_offloads_nothing_and_has_no_separate_host_memory(shape_3b, machine):
    machine.multiplies(1e12)
    choices = candidates(shape_3b, make_dataset(20), target_of(CPU, 0)).for_recipe(RECIPE)
    assert {(each.host_memory, each.options.offload) for each in choices} == {(0, False)}


@pytest.mark.usefixtures("gpu_with_bf16")
def test_a_3b_model_and_a_text_of_2546_tokens_fit_into_8_gb(shape_3b):
    dataset = make_dataset(80)
    dataset.examples[3] = Example(list(range(2546)), list(range(2546)), 3)
    recipe = dataclasses.replace(RECIPE, r=None)
    chosen = plan_of(shape_3b, dataset, recipe, target_of(CUDA, 750_000_000), MemoryBudget.parse("8GB")).chosen
    assert chosen.dtype == "bfloat16"
    assert chosen.options.offload
    assert chosen.options.chunked_blocks
    assert chosen.description.endswith("their inputs offloaded to host memory, MLPs in chunks of rows, 8-bit moments")


def questions_dataset() -> Dataset:
    """Documents that are all questions about one note of 100 tokens."""
    ids = [[*range(100), 200 + number, *range(20)] for number in range(30)]
    return dataset_of([Example(own, [IGNORE] * 101 + own[101:], number) for number, own in enumerate(ids)])


@pytest.mark.parametrize(
    ("head_size", "device", "words"),
    [
        (128, CUDA, "common beginnings computed once, which saves "),
        (80, CUDA, "common beginnings computed again for each text"),
        (80, CPU, "common beginnings computed once, which saves "),
    ],
)
def test_a_plan_says_how_what_texts_begin_with_is_computed(shape_3b, gpu_with_bf16, head_size, device, words):
    shape, dataset = dataclasses.replace(shape_3b, head_size=head_size), questions_dataset()
    chosen, without = (
        plan_of(shape, each, RECIPE, target_of(device, 650_000_000), MemoryBudget.parse("60GB")).chosen
        for each in (dataset, make_dataset(30))
    )
    assert words in chosen.description
    assert "beginnings" not in without.description


def test_on_a_gpu_sharing_saves_planned_memory_and_time(shape_3b, gpu_with_bf16):
    shared, again = (
        plan_3b(dataclasses.replace(shape_3b, head_size=size), "60GB", questions_dataset()).chosen for size in (128, 80)
    )
    assert shared.peak < again.peak
    assert shared.seconds < again.seconds


@pytest.mark.slow
@pytest.mark.usefixtures("has_bitsandbytes")
@pytest.mark.parametrize("stated", [{"r": 16}, {"load_in_4bit": False}, {"load_in_4bit": True}, {"method": "full"}])
def test_values_that_the_recipe_states_are_kept(shape_3b, stated):
    recipe = Recipe(name="test", description="", batch_tokens=4000, **stated)
    choices = choices_3b(shape_3b, make_dataset(20), recipe)
    assert len(choices) > 20
    for choice in choices:
        assert {key: getattr(choice.recipe, key) for key in stated} == stated
        assert choice.recipe.method == recipe.method


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_activations_are_recomputed_if_smaller_micro_batches_would_be_slower(shape_3b):
    # A long example fills the GPU alone; short ones must share a micro-batch.
    short = make_dataset(400, longest=60)
    chosen = plan_3b(shape_3b, "8.2GB", short).chosen
    assert chosen.options.checkpoints == 27
    assert chosen.options.max_rows >= 768
    fastest = plan_3b(shape_3b, "80GB", short).chosen
    assert 0.6 * chosen.seconds < fastest.seconds < 0.8 * chosen.seconds
    slow = candidates(shape_3b, short, target_of(CUDA, 650_000_000)).for_recipe(RECIPE)
    kept = [each for each in slow if each.options.checkpoints == 0 and each.peak <= 8.2e9]
    assert kept
    assert all(each.seconds > chosen.seconds for each in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_steps_of_full_fine_tuning_are_cut_last(shape_3b):
    recipe = RECIPE.replace(method="full", batch_tokens=1000)
    chosen = [plan.chosen for plan in all_plans(lambda size: plan_3b(shape_3b, size, recipe=recipe), "80GB")]
    rows = [each.options.max_rows for each in chosen]
    whole = [each for each in chosen if each.options.max_rows >= 1536]
    assert rows[: len(whole)] == [each.options.max_rows for each in whole]
    assert any(each.options.checkpoints == 27 for each in whole)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_full_fine_tuning_is_reported_if_it_fits(shape_3b):
    assert plan_3b(shape_3b, "12GB").full is None
    full = plan_3b(shape_3b, "24GB").full
    assert full.recipe.method == "full"
    assert full.peak <= 24e9
    assert plan_3b(shape_3b, "24GB").chosen.recipe.method == "lora"
    assert plan_3b(shape_3b, "24GB", recipe=RECIPE.replace(load_in_4bit=True)).full is None


@pytest.mark.usefixtures("gpu_with_bf16")
def test_full_fine_tuning_takes_more_memory_and_time_than_an_adapter(shape_3b):
    lora, full = (plan_3b(shape_3b, "200GB", recipe=RECIPE.replace(method=method)) for method in ("lora", "full"))
    # Updates within the backward pass have 8-bit moments, and keep no gradients.
    assert full.chosen.footprint.optimizer == 2 * shape_3b.parameters
    assert full.chosen.footprint.gradients == 0
    assert full.chosen.peak > lora.chosen.peak + 2 * shape_3b.parameters
    assert full.chosen.seconds > 1.3 * lora.chosen.seconds


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_more_text_takes_more_time_but_no_more_memory(shape_3b):
    few, many = (plan_3b(shape_3b, "10GB", make_dataset(count)) for count in (100, 800))
    assert 6 < many.chosen.seconds / few.chosen.seconds < 10
    assert many.chosen.peak == pytest.approx(few.chosen.peak, rel=0.1)


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_time_of_a_small_model_on_a_gpu_is_that_of_its_layers(two_layer_folder):
    shape, dataset = read_shape(resolve(two_layer_folder)), make_dataset(100)
    recipe = RECIPE.replace(batch_tokens=200)
    plan = plan_of(shape, dataset, recipe, target_of(CUDA, 0), MemoryBudget.parse("8GB"))
    steps = sum(example.num_loss_tokens for example in dataset.examples) * 0.75 / 200
    assert plan.chosen.seconds == pytest.approx(2 * steps * 2 * SECONDS_PER_LAYER, rel=0.25)


@pytest.mark.usefixtures("gpu_with_bf16")
@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_a_last_training_on_all_documents_takes_more_time_but_no_larger_micro_batches(shape_3b, device):
    dataset = make_dataset(200)
    judged, refitted = (
        plan_of(shape_3b, dataset, RECIPE.replace(refit=refit), target_of(device, 0), MemoryBudget(10**12))
        for refit in (False, True)
    )
    again = sum(example.num_loss_tokens for example in dataset.examples) / RECIPE.epochs
    trained = sum(example.num_loss_tokens for example in dataset.draw.splits(dataset.examples)[0].train)
    ratio = refitted.chosen.seconds / judged.chosen.seconds
    # Evaluations, of which the last training has fewer, take a tenth of the time.
    assert (trained + again) / trained * 0.85 < ratio < (trained + again) / trained
    own, other = (plan.chosen.footprint for plan in (judged, refitted))
    assert other.activations == pytest.approx(own.activations, rel=0.05)
    assert other.graphs == pytest.approx(own.graphs, rel=0.05)
    # On the CPU, the states to restore are part of the adapter.
    more = num_states_kept(_setup(shape_3b, device), 2) - num_states_kept(_setup(shape_3b, device), 1)
    assert other.adapter - own.adapter == (4 * more * shape_3b.adapter_parameters(4) if device == CPU else 0)


def _setup(shape, device):
    return TrainingSetup(shape, RECIPE, device == CUDA, has_kernels=device == CUDA, itemsize=2)


@pytest.mark.usefixtures("gpu_with_bf16")
def test_a_plan_can_be_written_as_json(shape_3b):
    plan = plan_3b(shape_3b, "9GB")
    record = json.loads(json.dumps(plan.to_dict()))
    assert record["peak"] == plan.chosen.peak == sum(record["footprint"].values()) <= record["budget"] == 9_000_000_000
    assert record["smaller"] == plan.smaller.to_dict()
    assert (record["method"], record["dtype"], record["r"]) == ("lora", "bfloat16", 4)


@pytest.mark.slow
def test_the_smallest_plan_runs_the_longest_examples_alone(two_layer_folder):
    shape, dataset = read_shape(resolve(two_layer_folder)), make_dataset(40, longest=30)
    plan = plan_of(shape, dataset, RECIPE, target_of(CPU, 0), MemoryBudget.parse("1GB"))
    while plan.smaller is not None:
        plan = plan_of(shape, dataset, RECIPE, target_of(CPU, 0), MemoryBudget(plan.chosen.peak - 1))
    longest = max(example.num_active_tokens for example in dataset.examples)
    assert longest <= plan.chosen.options.max_rows < 2 * longest


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_plan_for_an_absent_gpu_is_that_of_the_same_gpu_in_this_machine(shape_3b):
    absent = Target.absent_gpu(40 * 10**9)
    plan = plan_of(shape_3b, make_dataset(80), RECIPE, absent, MemoryBudget(absent.gpu))
    expected = plan_3b(shape_3b, "40GB").chosen
    assert plan.chosen.description == expected.description
    assert plan.chosen.peak - absent.context == expected.peak - expected.footprint.context
