"""Captured graphs give the eager results, do not wait for the GPU, and leave no trace."""

import functools

import pytest
import torch
from builders import (
    dequantised_llama,
    evaluated,
    gpu_sync_forbidden,
    limit_rows,
    make_examples,
    make_llama,
    make_step,
    make_tokenizer,
    outlined,
    save_model,
    schedule_of,
)
from graph_learners import RECIPE, FullAdaptation, LoraAdaptation, drop_graphs, error, make_learner, step_gradients
from model_families import MODELS, WITH_STATES

from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import attach, restore, snapshot, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.vocabulary import Vocabulary
from sebp_edge.engine.sparse.rows.batches import pack
from sebp_edge.engine.training.graphs import GraphPool, _CapturedGraph
from sebp_edge.engine.training.keystrokes import MOST_BYTES
from sebp_edge.engine.training.update_in_backward import UpdateInBackward
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import CannotCapture
from sebp_edge.events import ExamplesEvaluated, GraphCaptured, Notice
from sebp_edge.values.example import Example

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", [name for name in MODELS | WITH_STATES if name != "gemma2"])
@pytest.mark.parametrize("prompt", [0, 6])
def test_gradients_equal_the_eager_ones(family, prompt):
    examples = make_examples([31, 2, 17, 64, 5, 40], prompt)
    micro_batches = [examples[:3], examples[3:4], examples[4:]]
    adapted = LoraAdaptation((MODELS | WITH_STATES)[family]())
    with make_learner(adapted, examples) as learner:
        assert learner.plain.graphs is not None
        learner.lay_out(schedule_of(learner, [micro_batches]))
        loss, found = step_gradients(learner, micro_batches)
        again_loss, again = step_gradients(learner, micro_batches[::-1])
        eager_loss, eager = step_gradients(drop_graphs(learner), micro_batches)
    adapted.model.to(torch.float32)
    with make_learner(adapted, examples) as learner:
        true_loss, truth = step_gradients(drop_graphs(learner), micro_batches)
    assert abs(loss - true_loss) <= 2 * abs(eager_loss - true_loss) + 1e-2
    assert again_loss == pytest.approx(loss, rel=1e-5)
    assert error(found, truth) <= 2 * error(eager, truth) + 1e-4
    assert error(again, truth) <= 2 * error(eager, truth) + 1e-4


@pytest.mark.parametrize("prompt", [0, 6])
def test_memory_options_do_not_change_the_gradients(prompt, chunk_rows):
    examples = make_examples([31, 2, 17, 64, 5, 40], prompt)
    micro_batches = [examples[:3], examples[3:]]

    def all_gradients(options):
        with make_learner(LoraAdaptation(), examples, options=options) as learner:
            learner.lay_out(schedule_of(learner, [micro_batches]))
            found = step_gradients(learner, micro_batches)
            assert learner.plain.graphs is not None
            learner.step(make_step(learner, examples), 1e-3)
            with gpu_sync_forbidden():
                learner.step(make_step(learner, examples), 1e-3)
            return found

    in_fp32 = LoraAdaptation()
    in_fp32.model.to(torch.float32)
    with make_learner(in_fp32, examples) as learner:
        _, truth = step_gradients(drop_graphs(learner), micro_batches)
    loss, kept = all_gradients(FASTEST)
    one_loss, one = all_gradients(MemoryOptions(checkpoints=1))
    # Without checkpoints weights are joined with their adapters, which rounds otherwise.
    assert one_loss == pytest.approx(loss, rel=1e-3)
    assert error(one, truth) <= 2 * error(kept, truth)
    for offload in (False, True):
        again_loss, again = all_gradients(MemoryOptions(checkpoints=2, offload=offload))
        assert again_loss == one_loss
        assert error(again, one) <= 1e-6
    for chunked_blocks in (False, True):
        options = MemoryOptions(
            checkpoints=2, offload=True, chunked_blocks=chunked_blocks, small_buffers=True, moments_in_8_bits=True
        )
        chunk_rows(24)
        small_buffers_loss, small_buffers = all_gradients(options)
        assert small_buffers_loss == pytest.approx(loss, rel=1e-3)
        assert error(small_buffers, truth) <= 2 * error(kept, truth)


@pytest.mark.parametrize("dequantised_blocks", [0, 2, 3])
def test_a_base_in_4_bits_trains_with_graphs_without_waiting_for_the_gpu(dequantised_blocks, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    options = MemoryOptions(checkpoints=1, dequantised_blocks=dequantised_blocks)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    save_model(make_llama(**sizes), tmp_path)
    base = load_base_model(resolve(tmp_path), RECIPE.replace(load_in_4bit=True), torch.device("cuda"))
    examples, events = make_examples([31, 2, 17, 64, 5, 40], prompt=3), []
    micro_batches = [examples[:3], examples[3:4], examples[4:]]
    twin = LoraAdaptation(dequantised_llama(base.model, **sizes), torch.float32)
    adaptation = attach(base, RECIPE.replace(lora_alpha=8), seed=0)  # PEFT's default, as in the twin
    restore(adaptation, snapshot(twin))
    with make_learner(adaptation, examples, events, options) as learner:
        learner.lay_out(schedule_of(learner, [micro_batches]))
        loss, found = step_gradients(learner, micro_batches)
        assert learner.plain.graphs is not None
        assert {event.part for event in events} == {"update", "gradients"}
        eager_loss, eager = step_gradients(drop_graphs(learner), micro_batches)
    with make_learner(twin, examples) as learner:
        true_loss, truth = step_gradients(drop_graphs(learner), micro_batches)
    assert abs(loss - true_loss) <= 2 * abs(eager_loss - true_loss) + 1e-2
    assert error(found, truth) <= 2 * error(eager, truth) + 1e-4
    with make_learner(adaptation, examples) as learner:
        outcome = learner.step(make_step(learner, examples), 1e-3)
        with gpu_sync_forbidden():
            again = learner.step(make_step(learner, examples), 1e-3)
        assert learner.plain.graphs is not None
    assert float(again.loss) < float(outcome.loss)


def test_words_that_a_graph_reads_equal_the_eager_ones():
    examples = make_examples([31, 2, 17, 64, 5, 40], prompt=3)
    with make_learner(LoraAdaptation(), examples) as learner:
        words = WordReader(Vocabulary(make_tokenizer(), 320), learner.plain.device)
        learner.plain.words = lambda: words
        learner.plain.begin_graphs()
        ((_, rows, owners),) = learner.losses(evaluated(learner, examples), reads_words=True)
        assert learner.plain.graphs is not None
        ((_, expected, expected_owners),) = drop_graphs(learner).losses(evaluated(learner, examples), reads_words=True)
    assert torch.equal(owners, expected_owners)
    assert rows.shape == expected.shape == (sum(example.num_loss_tokens for example in examples), 6 + 2 * MOST_BYTES)
    # Which token is the likeliest may be a matter of rounding.
    for column in (0, 4, 5, *range(6, 6 + MOST_BYTES)):
        torch.testing.assert_close(rows[:, column], expected[:, column], rtol=2e-2, atol=2e-2)


def test_a_step_does_not_wait_for_the_gpu():
    examples = make_examples([31, 2, 17, 64, 5, 40])
    with make_learner(LoraAdaptation(), examples) as learner:
        limit_rows(learner, 100)
        assert len(learner.limit.cut(outlined(learner, examples))) == 2
        outcome = learner.step(make_step(learner, examples), 1e-3)
        with gpu_sync_forbidden():
            again = learner.step(make_step(learner, examples), 1e-3)
        assert learner.plain.graphs is not None
    assert float(again.loss) < float(outcome.loss)
    assert float(again.grad_norm) > 0


def test_a_capture_changes_neither_weights_moments_nor_random_states():
    examples = make_examples([31, 2, 17, 64, 5, 40])
    adapted = LoraAdaptation()
    before = {name: value.clone() for name, value in adapted.model.state_dict().items()}
    random_state = torch.cuda.get_rng_state()
    with make_learner(adapted, examples) as learner:
        learner.lay_out(schedule_of(learner, [[examples[:2]]]))
        list(learner.losses(evaluated(learner, examples[:2])))
        learner.plain.graphs.accumulate(pack(examples[:2]), 1)
        assert any(parameter.grad.any() for parameter in trainable(adapted))
        first = [parameter.grad.clone() for parameter in trainable(adapted)]
        moments = [value.clone() for moments in learner.plain.update._moments for value in moments[:2]]
        assert moments
        assert not any(value.any() for value in moments)
        # A second bucket is captured between two micro-batches of one step.
        weightless = pack(examples[2:]).weighted(0.0)
        assert not learner.plain.graphs.bucket(pack(examples[:2]).sizes).holds(weightless.sizes)
        learner.plain.graphs.accumulate(weightless, 1)
        assert len(learner.plain.graphs._captured) == 3
        for parameter, gradient in zip(trainable(adapted), first, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
        for name, value in adapted.model.state_dict().items():
            assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in trainable(adapted))


def test_examples_in_a_graph_do_not_affect_each_other():
    examples = make_examples([31, 17, 20])
    other = Example([7] * 31, [7] * 31, 0)
    with make_learner(LoraAdaptation(), [*examples, other]) as learner:
        ((_, losses, owners),) = learner.losses(evaluated(learner, examples))
        ((_, changed, _),) = learner.losses(evaluated(learner, [other, *examples[1:]]))
    assert torch.equal(losses[owners > 0], changed[owners > 0])
    assert not torch.equal(losses[owners == 0], changed[owners == 0])


def test_a_model_that_waits_for_the_gpu_trains_without_graphs_after_one_notice():
    model = make_llama()
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output if output.sum().item() else None)
    examples, events = make_examples([31, 2, 17, 64]), []
    with make_learner(LoraAdaptation(model), examples, events) as learner:
        limit_rows(learner, 50)
        losses = [float(learner.step(make_step(learner, examples), 1e-2).loss) for _ in range(4)]
        list(learner.losses(evaluated(learner, examples)))
        assert learner.plain.graphs is None
    assert losses[-1] < losses[0]
    captured, notice = (event for event in events if not isinstance(event, ExamplesEvaluated))
    assert isinstance(captured, GraphCaptured) and captured.part == "update" and captured.seconds > 0
    assert isinstance(notice, Notice)
    assert "without CUDA graphs" in notice.message


def test_random_numbers_can_be_drawn_after_a_capture_that_failed():
    graphs, drawn = GraphPool(torch.device("cuda"), lambda event: None), torch.zeros(4, device="cuda")
    draw = functools.partial(torch.rand, 4, out=drawn)
    graphs.warm_up(draw)
    replay = graphs.capture("draw", draw)
    with pytest.raises(CannotCapture):
        graphs.capture("wait", lambda: torch.rand(4, device="cuda").sum().item())
    assert torch.rand(4, device="cuda").unique().numel() == 4
    replay()
    before = drawn.clone()
    replay()
    assert not torch.equal(drawn, before)


@pytest.mark.parametrize("tied", [True, False])
def test_a_capture_of_updates_in_the_backward_pass_changes_nothing(tied):
    examples = make_examples([31, 2, 17, 64, 5, 40])
    adapted = FullAdaptation(tie_word_embeddings=tied)
    with make_learner(adapted, examples) as learner:
        assert isinstance(learner.plain.update, UpdateInBackward)
        # The first step makes the moments non-zero.
        learner.step(make_step(learner, examples), 1e-3)

        def state():
            moments = [value for moments in learner.plain.update._moments for value in moments]
            norms = [learner.plain.update.finish(), learner.plain.update._adamw.step]
            return [value.detach().clone() for value in (*adapted.model.parameters(), *moments, *norms)]

        before, random_state = state(), torch.cuda.get_rng_state()
        tokens = pack(examples[:2])
        tokens = tokens.filled(learner.plain.graphs.bucket(tokens.sizes))
        weightless = tokens.to("cuda").weighted(0.0)
        learner.plain.graphs._warm_up(learner.plain.graphs._key("gradients", tokens.sizes), tokens)
        run = functools.partial(learner.plain.graphs._run, "gradients")
        graph = _CapturedGraph(learner.plain.graphs._graphs, "gradients", weightless, run)
        assert all(torch.equal(one, other) for one, other in zip(before, state(), strict=True))
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
        assert all(parameter.grad is None for parameter in adapted.model.parameters())
        # A replay does change them.
        graph.fill(tokens.weighted(1 / 33))
        graph.replay()
        assert not any(torch.equal(*pair) for pair in zip(before[:5], state(), strict=False))


@pytest.mark.parametrize(
    "options",
    [FASTEST, MemoryOptions(checkpoints=2), MemoryOptions(checkpoints=2, offload=True, chunked_blocks=True)],
    ids=["kept", "in checkpoints", "offloaded, in chunks"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_captured_updates_in_the_backward_pass_agree_with_the_eager_ones(tied, options):
    examples = make_examples([31, 2, 17, 64, 5, 40])

    def trained(prepare):
        adapted = FullAdaptation(tie_word_embeddings=tied, num_hidden_layers=3)
        with make_learner(adapted, examples, options=options) as learner:
            prepare(learner)
            outcomes = [
                learner.step(make_step(learner, group), 1e-3) for group in (examples[:3], examples[3:], examples) * 4
            ]
            assert (learner.plain.graphs is None) is (prepare is drop_graphs)
        return torch.tensor([[*map(float, outcome)] for outcome in outcomes]), adapted.model.state_dict()

    start = FullAdaptation(tie_word_embeddings=tied, num_hidden_layers=3).model.state_dict()
    (captured, found), (eager, expected) = trained(lambda learner: None), trained(drop_graphs)
    torch.testing.assert_close(captured, eager, rtol=5e-2, atol=5e-2)
    assert captured[-1, 0] < captured[2, 0]
    # The random bits are the same, but gradients of filled buckets differ by rounding, which AdamW amplifies if they
    # are tiny.
    assert error(found.values(), expected.values()) < 0.5 * error(start.values(), expected.values())


def test_a_step_of_full_fine_tuning_neither_waits_nor_holds_all_gradients():
    examples = make_examples([5, 9])
    adapted = FullAdaptation(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    weights = sum(parameter.nbytes for parameter in adapted.model.parameters())
    with make_learner(adapted, examples) as learner:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        learner.step(make_step(learner, examples), 1e-3)
        with gpu_sync_forbidden():
            learner.step(make_step(learner, examples), 1e-3)
        assert learner.plain.graphs is not None
        assert torch.cuda.max_memory_allocated() - before < weights / 2
