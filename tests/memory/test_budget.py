"""Memory budgets are parsed as people write them, and the plan for a budget is the first that fits."""

import dataclasses
import json
import random
import re
from itertools import groupby, pairwise
from types import SimpleNamespace

import pytest
import torch
from builders import IGNORE, dataset_of
from memory_plans import RECIPE, all_plans
from transformers import LlamaConfig

from sebp_edge import Recipe
from sebp_edge.engine.memory import choosing
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.choosing import make_plan
from sebp_edge.engine.memory.memory_options import FASTEST
from sebp_edge.engine.memory.prediction import num_states_kept
from sebp_edge.engine.memory.seconds import SECONDS_PER_LAYER
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.memory.this_machine import target_of
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.four_bits import NF4_BYTES
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.errors import MachineError, OptionError
from sebp_edge.run.preparation import Preparation, Prepared
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import Progress

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def shape_3b(tmp_path_factory):
    """The shape of a 3B Llama, read from its config."""
    folder = tmp_path_factory.mktemp("models") / "llama-3b"
    sizes = {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    LlamaConfig(**sizes, **heads).save_pretrained(folder)
    return read_shape(resolve(folder))


@pytest.fixture
def gpu_with_bf16(machine):
    """Simulates an NVIDIA GPU with bf16 for plans, on any machine."""
    machine.computes_in(torch.bfloat16)
    machine.multiplies(700e12)
    machine.has_memory(64e9)
    machine.has_libraries(triton=True, bitsandbytes=False)


@pytest.fixture
def has_bitsandbytes(gpu_with_bf16, machine):
    machine.has_libraries(triton=True, bitsandbytes=True)


def make_dataset(num_documents: int, longest: int = 200) -> Dataset:
    draw = random.Random(0)
    lengths = [draw.randint(20, longest) for _ in range(num_documents)]
    examples = [Example(list(range(length)), list(range(length)), n) for n, length in enumerate(lengths)]
    return dataset_of(examples)


def plan_of(shape, dataset, recipe, target, budget):
    return make_plan(shape, dataset, make_schedules(dataset, recipe, seed=0), recipe, target, budget)


def candidates(shape, dataset, target, recipe=RECIPE):
    schedules = make_schedules(dataset, recipe, seed=0)
    return choosing._Candidates(shape, dataset, schedules, recipe, target, Progress())


def choices_3b(shape, dataset, recipe):
    """All choices of which a plan takes the first that fits."""
    return list(candidates(shape, dataset, target_of(CUDA, 650_000_000), recipe).for_recipe(recipe))


def plan_3b(shape, size, dataset=None, recipe=RECIPE):
    dataset = dataset or make_dataset(80)
    return plan_of(shape, dataset, recipe, target_of(CUDA, 650_000_000), MemoryBudget.parse(size))


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        (" 7.5GiB ", 8_053_063_680),
        ("8000MB", 8_000_000_000),
        ("1mib", 2**20),
        ("8000000000b", 8_000_000_000),
        (1_000_000, 1_000_000),
        (MemoryBudget(5), 5),
    ],
)
def test_sizes_are_parsed_as_people_write_them(text, size):
    assert MemoryBudget.parse(text) == MemoryBudget(size)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8000000000",
        "8XB",
        "GB",
        "-3GB",
        "0GB",
        "nan",
        "nanGB",
        "inf",
        "0.9MB",
        "eight",
        "8 GB of it",
        "1e9",
        "٨GB",
    ],
)
def test_an_invalid_size_raises_one_sentence(text):
    with pytest.raises(OptionError) as caught:
        MemoryBudget.parse(text)
    assert str(caught.value) == (
        f"The memory budget is {text!r}, but must be a size with a unit, such as '8GB', '7.5GiB' or '8000MB', from 1 "
        "MB to 9 EB."
    )


@pytest.mark.parametrize("number", [0, -5, 8, True, 8.5, float("nan"), None])
def test_a_number_that_is_no_size_in_bytes_raises_one_sentence(number):
    with pytest.raises(OptionError) as caught:
        MemoryBudget.parse(number)
    assert f"The memory budget is {number!r}, but must be a number of bytes, or a text such as '8GB'" in str(
        caught.value
    )


@pytest.mark.parametrize("size", [10**30, 10**5000, "9" * 25 + "GB"], ids=["number", "long number", "text"])
def test_a_size_beyond_any_memory_raises_one_sentence(size):
    with pytest.raises(OptionError, match=r"from (0\.1|1) MB to 9 EB"):
        MemoryBudget.parse(size)


# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_first_choice_that_fits_is_taken_and_its_neighbours_are_reported(shape_3b):
    dataset = make_dataset(20)
    plans = all_plans(lambda size: plan_3b(shape_3b, size, dataset), "80GB")
    assert (plans[0].chosen.options, plans[0].larger) == (FASTEST, None)
    assert len(plans) > 8
    for larger, smaller in pairwise(plans):
        assert smaller.chosen == larger.smaller
        assert smaller.larger == larger.chosen
        assert smaller.chosen.peak < larger.chosen.peak
    # A budget of exactly the peak is enough.
    for plan in plans[1::5]:
        assert plan_3b(shape_3b, plan.chosen.peak, dataset).chosen == plan.chosen
    assert [plan.chosen for plan in plans] == list(choosing._ever_smaller(choices_3b(shape_3b, dataset, RECIPE)))


@pytest.mark.slow
@pytest.mark.usefixtures("has_bitsandbytes")
def test_plans_get_slower_before_they_get_less_precise(shape_3b):
    recipe = RECIPE.replace(batch_tokens=2000)
    recipe = dataclasses.replace(recipe, r=None)
    # These are all that some budget chooses.
    chosen = list(choosing._ever_smaller(choices_3b(shape_3b, make_dataset(80), recipe)))
    precision = [(not each.options.moments_in_8_bits, not each.recipe.load_in_4bit, each.recipe.r) for each in chosen]
    assert precision == sorted(precision, reverse=True)
    assert precision[0] == (True, True, 16)
    assert precision[-1] == (False, False, 4)
    for _, alike in groupby(zip(precision, chosen, strict=True), key=lambda pair: pair[0]):
        seconds = [each.seconds for _, each in alike]
        assert seconds == sorted(seconds)
    assert {each.recipe.lora_alpha / each.recipe.r for each in chosen} == {2}
    # All descriptions differ.
    assert len({each.description for each in chosen}) == len(chosen)
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


def test_a_training_on_a_cpu_has_no_separate_host_memory(shape_3b, machine):
    machine.multiplies(1e12)
    choices = candidates(shape_3b, make_dataset(20), target_of(CPU, 0)).for_recipe(RECIPE)
    assert {each.host_memory for each in choices} == {0}


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


def test_on_a_cpu_nothing_is_offloaded(shape_3b, machine):
    machine.multiplies(1e12)
    choices = candidates(shape_3b, make_dataset(20), target_of(CPU, 0)).for_recipe(RECIPE)
    assert not any(each.options.offload for each in choices)


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
def test_in_fp8_weights_take_as_much_as_in_bf16_and_quantised_rows_come_on_top(shape_3b):
    plain, in_fp8 = (plan_3b(shape_3b, "24GB", recipe=RECIPE.replace(**each)) for each in ({}, {"load_in_fp8": True}))
    assert in_fp8.chosen.dtype == "fp8" and in_fp8.full is None
    assert in_fp8.chosen.description.startswith("LoRA of rank 4 on fp8, ")
    before, now = plain.chosen.footprint, in_fp8.chosen.footprint
    assert now.weights == before.weights
    # The widest tensor is the gradient of gate and up.
    rows = (now.activations - before.activations) // (2 * 8192)
    assert now.activations - before.activations == rows * 2 * 8192 and 0 < rows <= in_fp8.chosen.options.max_rows
    assert all(choice is None or not choice.recipe.load_in_4bit for choice in (in_fp8.larger, in_fp8.smaller))
    with pytest.raises(MachineError, match="load the model in 4 bits"):
        plan_3b(shape_3b, "5GB", recipe=RECIPE.replace(load_in_4bit=False))
    with pytest.raises(MachineError) as refused:
        plan_3b(shape_3b, "5GB", recipe=RECIPE.replace(load_in_fp8=True))
    assert "load the model in 4 bits" not in str(refused.value)


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_error_if_nothing_fits_says_what_would(shape_3b):
    with pytest.raises(MachineError) as error:
        plan_3b(shape_3b, "3GB")
    message = str(error.value)
    assert "'llama-3b' has 3.21 billion parameters and needs at least about" in message
    assert "the memory budget is 3.0 GB" in message
    assert "4 bits" not in message
    enough = message.split("raise the budget to ")[1].split(" or ")[0]
    assert plan_3b(shape_3b, enough).chosen.peak <= MemoryBudget.parse(enough).size
    assert float(message.split("at most about ")[1].split()[0]) == pytest.approx(1.1, abs=0.2)


@pytest.mark.usefixtures("gpu_with_bf16")
@pytest.mark.parametrize("requested", [False, True], ids=["budget", "what other programs leave of it"])
@pytest.mark.parametrize("lacking", [1, 3 * 10**7, 10**9])
def test_a_refusal_never_needs_as_much_as_it_has(shape_3b, lacking, requested):
    dataset, on_gpu = make_dataset(8), target_of(CUDA, 650_000_000)
    smallest = min(choice.peak for choice in candidates(shape_3b, dataset, on_gpu).for_recipe(RECIPE))
    size = smallest - lacking
    budget = MemoryBudget(size, size + lacking // 2 + 1 if requested else None)
    with pytest.raises(MachineError) as caught:
        plan_of(shape_3b, dataset, RECIPE, on_gpu, budget)
    sizes = re.findall(r"(?:about|is|leave) ([\d,.]+ (?:GB|MB|bytes))", str(caught.value))
    assert len(sizes) == 2 + requested
    assert len({*sizes}) == len({smallest, budget.size, budget.requested or budget.size}), sizes


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_with_bf16")
def test_if_4_bits_would_fit_the_error_says_so_and_what_to_install(shape_3b, request):
    with pytest.raises(MachineError, match=r"or load the model in 4 bits, after pip install 'sebp-edge\[4bit\]'\.$"):
        plan_3b(shape_3b, "5GB")
    request.getfixturevalue("has_bitsandbytes")
    assert plan_3b(shape_3b, "5GB").chosen.dtype == "nf4"
    with pytest.raises(MachineError, match=r"or load the model in 4 bits\.$"):
        plan_3b(shape_3b, "5GB", recipe=RECIPE.replace(load_in_4bit=False))


@pytest.mark.slow
@pytest.mark.usefixtures("has_bitsandbytes")
def test_what_4_bits_leave_of_the_budget_holds_dequantised_blocks(shape_3b):
    recipe, blocks = RECIPE.replace(load_in_4bit=True), len(shape_3b.blocks)
    dataset, sizes = make_dataset(80, longest=60), [5 * 10**9, 6 * 10**9, 7 * 10**9, 80 * 10**9]
    plans = [plan_3b(shape_3b, size, dataset, recipe).chosen for size in sizes]
    numbers = [each.options.dequantised_blocks for each in plans]
    assert 0 < max(numbers[:3]) < numbers[3] == blocks
    assert all(larger.seconds < smaller.seconds for smaller, larger in pairwise(plans))
    for number, chosen in zip(numbers, plans, strict=True):
        kept = f"{number} of {blocks} blocks kept in bf16" if number else f"every pass dequantises all {blocks}"
        assert kept in chosen.description
    for size, chosen in zip(sizes[:3], plans[:3], strict=True):
        # One block more would not fit.
        assert chosen.peak <= size < chosen.peak + 2 * shape_3b.blocks[0].parameters * 1.05
    in_bf16 = plan_3b(shape_3b, "80GB", dataset).chosen.footprint
    held = plans[3].footprint.weights - in_bf16.weights
    # With the copies of adapters beside weights.
    assert plans[3].footprint.adapter == in_bf16.adapter > plans[0].footprint.adapter
    assert held == pytest.approx(NF4_BYTES * shape_3b.linear_parameters, rel=0.01)
    assert plan_3b(shape_3b, "80GB").chosen.options.dequantised_blocks == 0
    assert "kept" not in plan_3b(shape_3b, "80GB").chosen.description


@pytest.mark.usefixtures("has_bitsandbytes")
def test_without_a_budget_dequantised_blocks_take_half_of_what_the_training_leaves_free(shape_3b):
    recipe, blocks = RECIPE.replace(load_in_4bit=True), len(shape_3b.blocks)
    dataset, target = make_dataset(80, longest=60), target_of(CUDA, 650_000_000)
    schedules = make_schedules(dataset, recipe, seed=0)

    def filled(free):
        return choosing.fill_free_memory(shape_3b, dataset, schedules, recipe, target, free)

    least, most = filled(10**9), filled(80 * 10**9)
    assert least.options == FASTEST and least.peak > 10**9
    assert least.kept == f"no block kept in bf16: every pass dequantises all {blocks}"
    assert most.options == dataclasses.replace(FASTEST, dequantised_blocks=blocks)
    assert most.kept == f"{blocks} of {blocks} blocks kept in bf16"
    numbers = []
    for free in range(least.peak, most.peak + 7 * 10**9, 2 * 10**9):
        found = filled(free)
        numbers.append(found.options.dequantised_blocks)
        # One block more would not fit.
        room = (free - least.peak) // 2
        assert found.peak - least.peak <= room
        assert numbers[-1] == blocks or found.peak - least.peak > room - 2 * 1.05 * shape_3b.blocks[0].parameters
    assert numbers == sorted(numbers) and 0 in numbers and blocks in numbers and len({*numbers}) > 3


@pytest.mark.usefixtures("has_bitsandbytes")
@pytest.mark.parametrize("changes", [{}, {"load_in_4bit": False}, {"budget": MemoryBudget(10**9)}, {"on_gpu": False}])
def test_only_4_bits_on_a_gpu_without_a_budget_fill_the_free_memory(shape_3b, changes):
    recipe, said = RECIPE.replace(load_in_4bit=changes.get("load_in_4bit", True)), []
    call = SimpleNamespace(
        recipe=recipe,
        seed=0,
        on_gpu=changes.get("on_gpu", True),
        budget=changes.get("budget"),
        shape=shape_3b,
        target_and_budget=lambda: (target_of(CUDA, 650_000_000), MemoryBudget(80 * 10**9)),
        notify=said.append,
    )
    prepared = Prepared(make_dataset(8), starting_point=None)
    schedules = make_schedules(prepared.dataset, recipe, seed=0)
    found = Preparation(call, reading=None).fill_free_memory(recipe, FASTEST, prepared, schedules)
    if changes:
        assert found == FASTEST and said == []
    else:
        assert found == dataclasses.replace(FASTEST, dequantised_blocks=28)
        (notice,) = said
        assert notice.message.endswith("the free GPU memory decides: 28 of 28 blocks kept in bf16.")


def test_a_model_that_runs_on_padded_batches_keeps_no_block(shape_3b, machine):
    machine.multiplies(1e12)
    padded = dataclasses.replace(
        shape_3b, blocks=tuple(dataclasses.replace(block, kind=None) for block in shape_3b.blocks)
    )
    recipe, dataset = RECIPE.replace(load_in_4bit=True), make_dataset(20)
    schedules = make_schedules(dataset, recipe, seed=0)
    found = choosing.fill_free_memory(padded, dataset, schedules, recipe, target_of(CPU, 0), 10**12)
    assert found.options.dequantised_blocks == 0
    assert found.kept.startswith("no block kept in fp32: ")


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_error_suggests_no_model_if_the_process_alone_exceeds_the_budget(shape_3b):
    with pytest.raises(MachineError) as error:
        plan_3b(shape_3b, "100MB")
    assert "choose a model" not in str(error.value)


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
