"""Captured graphs save and release memory, and running out of memory during a capture leaves no trace."""

from contextlib import nullcontext

import pytest
import torch
from builders import evaluated, limit_rows, make_examples, make_step, schedule_of
from failing_memory import gradients as step_that_fails
from graph_learners import LoraAdaptation, drop_graphs, error, make_learner
from processes import Processes
from transformers import LlamaConfig, LlamaForCausalLM

from sebp_edge.events import GraphCaptured, MemoryRanOut, Notice

pytestmark = pytest.mark.gpu


def test_blocks_in_checkpoints_use_less_memory():
    # These heads run on our attention kernels; with flash attention, its sums would be the peak.
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, **sizes)
    examples = make_examples([64] * 60)

    def taken(**options):
        with make_learner(LoraAdaptation(LlamaForCausalLM(config)), examples, **options) as learner:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            learner.step(make_step(learner, examples), 1e-3)
            return torch.cuda.max_memory_allocated() - before

    taken()  # creates what is created once
    kept, recomputed = taken(), taken(checkpoints=7)
    per_token = 2 * 7 * (2 * 1024 + 5 * 256)
    assert kept - recomputed > 0.5 * 60 * 63 * per_token
    offloaded = taken(checkpoints=7, offload=True)
    chunked = taken(checkpoints=7, offload=True, chunked_blocks=True)
    assert recomputed - offloaded > 0.5 * 60 * 63 * 2 * 7 * 256
    assert chunked < offloaded


def test_memory_is_released():
    config = LlamaConfig(vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    adapted = LoraAdaptation(LlamaForCausalLM(config))
    examples = make_examples([64] * 60)

    def allocated_after_a_training():
        with make_learner(adapted, examples) as learner:
            learner.step(make_step(learner, examples), 1e-3)
            list(learner.losses(evaluated(learner, examples)))
            during = torch.cuda.memory_allocated()
        del learner
        torch.cuda.synchronize()
        return during, torch.cuda.memory_allocated()

    # The first training allocates what is allocated once, such as cuBLAS's workspace.
    _, before = allocated_after_a_training()
    during, after = allocated_after_a_training()
    assert during > before
    assert after <= before


class Hook:
    """Raises an error in one call of a layer, counted from `fail_at`."""

    def __init__(self, adapted, error=torch.OutOfMemoryError):
        self.calls, self.number, self.error = 0, 0, error
        adapted.model.get_base_model().model.layers[1].register_forward_hook(self)

    def fail_at(self, number):
        self.calls, self.number = 0, number

    def __call__(self, module, inputs, output):
        self.calls += 1
        if self.calls == self.number:
            raise self.error("no more")


def step_gradients(learner, examples, monkeypatch):
    """Runs a step that updates nothing; returns its loss and gradients."""
    loss, *found = step_that_fails(learner, examples, nullcontext(), monkeypatch)
    return float(loss), found


OFFLOADED = {"checkpoints": 2, "offload": True}


# The first call for a new bucket is the warm-up, the second one the capture.
@pytest.mark.parametrize("call", [1, 2], ids=["in the warm-up", "in the capture"])
@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["all kept", "during a copy"])
def test_running_out_of_memory_while_a_graph_is_made_adds_no_gradients(options, call, monkeypatch):
    examples = make_examples([31, 2, 17, 40, 5, 23, 27, 30])
    rows = sum(example.num_active_tokens for example in examples)
    with make_learner(LoraAdaptation(), examples, **options) as learner:
        limit_rows(learner, -(-rows // 2))
        learner.lay_out(schedule_of(learner, [[examples]]))
        expected_loss, expected = step_gradients(learner, examples, monkeypatch)
    adapted, events = LoraAdaptation(), []
    hook, stream = Hook(adapted), torch.cuda.current_stream()
    with make_learner(adapted, examples, events, **options) as learner:
        learner.lay_out(schedule_of(learner, [[examples]]))
        hook.fail_at(call)
        loss, found = step_gradients(learner, examples, monkeypatch)
        assert torch.cuda.current_stream() == stream
        assert [event for event in events if isinstance(event, MemoryRanOut)] == [MemoryRanOut(4096, -(-rows // 2))]
        assert learner.plain.graphs is not None
        captured = len([event for event in events if isinstance(event, GraphCaptured)])
        again_loss, again = step_gradients(learner, examples, monkeypatch)
        assert len([event for event in events if isinstance(event, GraphCaptured)]) == captured
    assert not any(isinstance(event, Notice) for event in events)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert again_loss == pytest.approx(expected_loss, rel=1e-3)
    assert error(found, expected) <= 1e-2
    assert error(again, expected) <= 1e-2


@pytest.mark.parametrize("call", [1, 2], ids=["in the warm-up", "in the capture"])
@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["all kept", "during a copy"])
def test_ctrl_c_while_a_graph_is_made_ends_the_training(options, call):
    adapted, events = LoraAdaptation(), []
    hook, stream = Hook(adapted, KeyboardInterrupt), torch.cuda.current_stream()
    examples = make_examples([31, 2, 17, 40])
    with pytest.raises(KeyboardInterrupt), make_learner(adapted, examples, events, **options) as learner:
        learner.lay_out(schedule_of(learner, [[examples]]))
        hook.fail_at(call)
        learner.step(make_step(learner, examples), 1e-3)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert not any(isinstance(event, Notice) for event in events)


def test_a_single_example_that_only_fits_without_graphs_is_trained_without_them(monkeypatch):
    examples, adapted, events = make_examples([40]), LoraAdaptation(), []
    hook = Hook(adapted)
    with make_learner(adapted, examples, events) as learner:
        _, expected = step_gradients(learner, examples, monkeypatch)
    events.clear()
    with make_learner(adapted, examples, events) as learner:
        hook.fail_at(1)
        _, found = step_gradients(learner, examples, monkeypatch)
        assert learner.plain.graphs is None
        hook.fail_at(1)
        with pytest.raises(torch.OutOfMemoryError):
            learner.step(make_step(learner, examples), 1e-3)
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert "memory ran out with them" in notice.message
    assert not any(isinstance(event, MemoryRanOut) for event in events)
    # Other kernels round differently in bf16; a part added twice would exceed this.
    assert error(found, expected) <= 5e-2


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_under_a_cap_the_training_continues_with_smaller_micro_batches(graphs):
    # In a process of its own, since other tests leave holes in torch's memory.
    with Processes(1) as processes:
        processes.run(train_under_a_cap, graphs)


def train_under_a_cap(rank, graphs):
    config = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8
    )
    adapted = LoraAdaptation(LlamaForCausalLM(config))
    # All have the same length, so that the halves of a micro-batch share one bucket.
    examples = make_examples([64] * 60)

    def train(events):
        with make_learner(adapted, examples, events) as learner:
            if not graphs:
                drop_graphs(learner)
            learner.lay_out(schedule_of(learner, [[examples] * 3]))
            # With a learning rate of zero, all trainings here are the same.
            losses = [float(learner.step(make_step(learner, examples), 0.0).loss) for _ in range(3)]
            assert (learner.plain.graphs is not None) == graphs
            return losses, sum(float(losses.sum()) for _, losses, _ in learner.losses(evaluated(learner, examples)))

    def held_after(events):
        torch.cuda.reset_peak_memory_stats()
        found = train(events)
        torch.cuda.synchronize()
        # Blocks that the allocator does not split are larger than what was asked for.
        return found, torch.cuda.memory_stats()["requested_bytes.all.current"]

    # The first training allocates what is allocated once, such as cuBLAS's workspace.
    train([])
    torch.cuda.empty_cache()
    held, events = torch.cuda.memory_allocated(), []
    expected, before = held_after(events)
    assert not any(isinstance(event, MemoryRanOut) for event in events)
    taken = torch.cuda.max_memory_allocated() - held
    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved() + int(0.4 * taken)
    events = []
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    found, after = held_after(events)
    assert torch.cuda.max_memory_reserved() <= cap
    ran_out = [event for event in events if isinstance(event, MemoryRanOut)]
    assert ran_out
    assert ran_out[0].max_rows_before == 4096
    assert all(event.max_rows < event.max_rows_before for event in ran_out)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert found[1] == pytest.approx(expected[1], rel=1e-2)
    assert after <= before
