"""On a GPU the budget covers the whole process, dry runs change nothing, and other programs' memory is noticed.

Run this file with -n 0, since free memory is that of the whole GPU.
"""

import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
import torch
from builders import make_llama, make_sentences, save_model

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.memory.guard import MIN_FREE
from sebp_edge.errors import MachineError
from sebp_edge.events import MemoryPressure, MemoryProbed, MemoryRanOut, Notice, StepDone
from sebp_edge.machine import devices, process, stacks
from sebp_edge.machine.process import memory_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
RECIPE = Recipe(name="test", description="", r=16, epochs=1, batch_tokens=8000, context_length=512)


@pytest.fixture
def make(tmp_path):
    """A function that makes a Personalizer of a bf16 model with 0.13 billion parameters and large activations."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    model = make_llama(**sizes, num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=512)
    save_model(model.to(torch.bfloat16), tmp_path / "model")

    def personalizer(**options):
        options = {"recipe": RECIPE, "device": "cuda", "store": AdapterStore(tmp_path / "store")} | options
        return Personalizer(tmp_path / "model", **options)

    return personalizer


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("memory_budget", ["8GB", 1.1], ids=["ample", "tight"])
def test_an_adaptation_stays_within_its_plan_and_restores_the_cap(make, memory_budget, method):
    texts, recipe = make_sentences(60, words=200), RECIPE.replace(method=method)
    # Memory left by earlier tests would be part of the plan.
    devices.release_memory(CUDA)
    if memory_budget == 1.1:
        # A tenth more than the smallest plan.
        plan = make(recipe=recipe, memory_budget="70GB").plan(texts)
        while plan.smaller is not None:
            plan = make(recipe=recipe, memory_budget=plan.chosen.peak - 1).plan(texts)
        memory_budget = int(1.1 * plan.chosen.peak)
    events = []
    personalizer = make(recipe=recipe, memory_budget=memory_budget, on_event=events.append)
    plan = personalizer.plan(texts)
    devices.release_memory(CUDA)
    before = torch.cuda.memory_reserved()
    result = personalizer.adapt(texts)
    used = torch.cuda.max_memory_reserved() - before
    own = plan.chosen.peak - plan.chosen.footprint.context
    # After an earlier training cuBLAS has a third workspace, in addition to the two that are planned.
    left = 32 * 2**20
    assert 0.5 * own < used <= own + left
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    # The memory of the process includes CUDA's context and libraries.
    assert result.peak_memory_bytes <= plan.chosen.peak + left and plan.chosen.peak <= plan.budget
    assert result.predicted_peak_bytes == pytest.approx(plan.chosen.peak, rel=0.02)
    assert 0 < result.allocator_peak_bytes <= result.peak_memory_bytes - 100_000_000
    probed = next(event for event in events if isinstance(event, MemoryProbed))
    assert probed.allocator_peak <= probed.peak <= plan.budget
    assert not any(isinstance(event, MemoryRanOut | MemoryPressure) for event in events)
    allocated = torch.cuda.memory_allocated()
    personalizer.adapt(texts)
    # One of the two adaptations may have kept its adapter.
    assert torch.cuda.memory_allocated() <= allocated + 32 * 2**20


def test_after_an_error_the_cap_is_restored_and_all_memory_is_released(make):
    texts, personalizer, requested = make_sentences(60, words=200), make(memory_budget="8GB"), []

    def stop(event):
        if isinstance(event, StepDone):
            raise torch.OutOfMemoryError

    personalizer.on_event = stop
    # The first run allocates what is allocated once, such as cuBLAS's workspace.
    for _ in range(2):
        with pytest.raises(MachineError, match="memory while training; nothing was saved"):
            personalizer.adapt(texts)
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
        # Requested bytes, since restored weights may get slightly larger blocks.
        requested.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
    assert requested[1] <= requested[0]


# What exceeds a cap is larger than holes that few tests have left in torch's segments; the rest may fit in them.
@pytest.mark.fills_gpu
def test_exceeding_a_cap_runs_out_of_memory_and_the_cap_is_undone():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with process.capped(CUDA) as cap:
        cap(before + 2**29)
        kept = torch.empty(2**28, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**30, dtype=torch.uint8, device=CUDA)
        cap(before + 2**31)
        more = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
        # A cap below the current use frees nothing.
        cap(0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**30, dtype=torch.uint8, device=CUDA)
        assert more.numel() > kept.numel()
    assert torch.empty(2**31, dtype=torch.uint8, device=CUDA).numel() == 2**31


def test_the_memory_outside_torchs_allocator_is_measured():
    torch.ones(512, 512, device=CUDA) @ torch.ones(512, 512, device=CUDA)
    memory = memory_of(CUDA)
    if memory._reported() is None:
        pytest.skip("the driver does not report the memory of processes here")
    assert 100_000_000 < memory.outside < 3_000_000_000
    free, total = torch.cuda.mem_get_info()
    assert memory.used <= total - free + 64 * 2**20
    before = memory.outside
    kept = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    # Tensors do not count as outside.
    memory.measure()
    assert memory.outside == pytest.approx(before, abs=64 * 2**20)
    assert memory.used >= before + kept.numel()


@pytest.mark.fills_gpu
def test_lowering_stacks_frees_memory_and_does_not_change_results():
    x = torch.randn(300, 200, device=CUDA, dtype=torch.bfloat16)
    expected = x @ x.T  # loads the libraries of matrix products
    torch.cuda.synchronize()
    free, gained = devices.free_memory(CUDA), stacks.reserved(CUDA) - stacks.min_reserved(CUDA)
    assert gained > 10_000_000
    with stacks.lowered(CUDA):
        assert devices.free_memory(CUDA) - free == pytest.approx(gained, rel=0.1)
        assert torch.equal(x @ x.T, expected)
        torch.testing.assert_close((x @ x.T).float(), x.float() @ x.float().T, rtol=0.02, atol=0.2)
    assert devices.free_memory(CUDA) == pytest.approx(free, abs=32 * 2**20)


# ---------------------------------------------------------------------------------------------------- other programs


HOG = """
import sys, torch
blocks = []
for size in (2**30, 2**24):
    while torch.cuda.mem_get_info()[0] - size > int(sys.argv[1]):
        blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_takes_memory(leaving):
    """Within the context, another process holds the GPU's free memory, except for `leaving` bytes."""
    command = [sys.executable, "-c", HOG, str(leaving)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "taken\n"
            yield
        finally:
            other.kill()


@pytest.mark.fills_gpu
def test_micro_batches_become_smaller_if_another_process_takes_memory(make):
    texts, events = make_sentences(60, words=200), []
    recipe = RECIPE.replace(batch_tokens=1500, epochs=4, learning_rate=1e-3)
    with ExitStack() as others:

        def on_event(event):
            events.append(event)
            # Just before a check, and after the first epochs, which capture graphs: that may run out of memory.
            if isinstance(event, StepDone) and (event.phase, event.step) == ("train", 15):
                others.enter_context(another_process_takes_memory(MIN_FREE // 2))

        result = make(recipe=recipe, on_event=on_event).adapt(texts)
    shortages = [event for event in events if isinstance(event, MemoryPressure)]
    assert shortages
    assert shortages[0].max_rows < shortages[0].max_rows_before
    assert shortages[0].shortfall > 0
    last = [event for event in events if isinstance(event, StepDone)][-1]
    assert last.step == last.steps
    assert result.heldout_loss_after < result.heldout_loss_before


@pytest.mark.fills_gpu
def test_a_budget_is_limited_to_the_memory_that_another_process_leaves(make):
    texts, events = make_sentences(60, words=200), []
    with another_process_takes_memory(4 * 10**9):
        plan = make(memory_budget="70GB").plan(texts)
        assert plan.requested_budget == 70 * 10**9
        assert plan.budget == pytest.approx(devices.free_memory(CUDA) + memory_of(CUDA).used, abs=64 * 2**20)
        result = make(memory_budget="70GB", on_event=events.append).adapt(texts)
        assert result.peak_memory_bytes <= plan.budget + 64 * 2**20
    assert any("of which other programs leave" in event.message for event in events if isinstance(event, Notice))
    torch.cuda.empty_cache()
    with another_process_takes_memory(20_000_000), pytest.raises(MachineError, match=r"close other programs"):
        make(memory_budget="70GB").adapt(texts, fresh=True)
