"""Where no plan fits into the memory, the error says what would."""

import re

import pytest
from memory_plans import CUDA, RECIPE, candidates, make_dataset, plan_3b, plan_of

from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.this_machine import target_of
from sebp_edge.errors import MachineError


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_error_if_nothing_fits_says_what_would(shape_3b):
    with pytest.raises(MachineError) as error:
        plan_3b(shape_3b, "1.5GB")
    message = str(error.value)
    assert "'llama-3b' has 3.21 billion parameters and needs at least about" in message
    assert "the memory budget is 1.5 GB" in message
    assert "4 bits" not in message
    enough = message.split("raise the budget to ")[1].split(" or ")[0]
    assert plan_3b(shape_3b, enough).chosen.peak <= MemoryBudget.parse(enough).size
    assert float(message.split("at most about ")[1].split()[0]) == pytest.approx(1.7, abs=0.2)


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
        plan_3b(shape_3b, "2GB")
    request.getfixturevalue("has_bitsandbytes")
    assert plan_3b(shape_3b, "2GB").chosen.dtype == "nf4"
    with pytest.raises(MachineError, match=r"or load the model in 4 bits\.$"):
        plan_3b(shape_3b, "2GB", recipe=RECIPE.replace(load_in_4bit=False))


@pytest.mark.usefixtures("gpu_with_bf16")
def test_the_error_suggests_no_model_if_the_process_alone_exceeds_the_budget(shape_3b):
    with pytest.raises(MachineError) as error:
        plan_3b(shape_3b, "100MB")
    assert "choose a model" not in str(error.value)


@pytest.mark.usefixtures("has_bitsandbytes")
def test_a_host_without_memory_for_streamed_blocks_is_told_how_much_they_need(shape_3b, machine):
    dataset, recipe = make_dataset(8), RECIPE.replace(load_in_4bit=True)
    streamed = plan_3b(shape_3b, "2.6GB", dataset, recipe).chosen
    assert streamed.options.streamed_blocks and streamed.host_memory > 1.3e9
    machine.has_memory(1e9)
    with pytest.raises(MachineError, match=r"or free host memory, where its blocks need 1.6 GB but 1.0 GB are free\.$"):
        plan_3b(shape_3b, "2.6GB", dataset, recipe)
