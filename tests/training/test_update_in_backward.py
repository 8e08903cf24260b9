"""Updates within the backward pass equal those of AdamW with gradients clipped per tensor, and drop the gradients."""

import weakref

import pytest
import torch
from builders import FullAdaptation, limit_rows, make_llama, make_step, outlined, train
from model_families import MODELS

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import snapshot
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training import update_in_backward
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.engine.training.update import Update
from sebp_edge.engine.training.update_in_backward import UpdateInBackward
from sebp_edge.errors import NonFiniteLoss
from sebp_edge.events import Evaluated, Notice, StepDone, silent
from sebp_edge.ops import adamw_
from sebp_edge.values.example import Example

RECIPE = Recipe(
    name="test",
    description="",
    method="full",
    learning_rate=3e-3,
    weight_decay=0.1,
    max_grad_norm=0.2,
    epochs=2,
    batch_tokens=150,
    context_length=64,
)


def make_examples(lengths):
    draw = torch.Generator().manual_seed(len(lengths))
    # A narrow range of tokens, so that there is something to learn.
    ids = [torch.randint(3, 40, (length,), generator=draw).tolist() for length in lengths]
    return [Example(tokens, tokens, number) for number, tokens in enumerate(ids)]


EXAMPLES = make_examples([31, 2, 17, 64, 5, 40, 23, 8])


def make_learner(model, on_event=silent, recipe=RECIPE):
    return RecoveringLearner(FullAdaptation(model), recipe, EXAMPLES, Collator(64, 2), on_event)


def train_with_torchs_adamw(model, micro_batches, rates):
    """Trains with torch's AdamW and gradients clipped per tensor; returns the gradient norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=RECIPE.weight_decay)
    norms = []
    with RowLosses(model, EXAMPLES, Collator(64, 2), torch.device("cpu"), silent) as rows:
        for group, rate in zip(micro_batches, rates, strict=True):
            optimizer.zero_grad()
            losses, _ = rows([example.outline(EXAMPLES.index(example)) for example in group])
            losses.mean().backward()
            each = [torch.nn.utils.clip_grad_norm_([p], RECIPE.max_grad_norm) for p in model.parameters()]
            norms.append(float(torch.stack(each).norm()))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return norms


@pytest.mark.parametrize("family", ["llama", "untied", "gemma2", "phi3"])
def test_updates_equal_those_of_torchs_adamw(family, updated_in_backward):
    def make():
        return make_llama(tie_word_embeddings=False) if family == "untied" else MODELS[family]()

    micro_batches, rates = [EXAMPLES[:3], EXAMPLES[3:], EXAMPLES[:5]], [1e-3, 3e-3, 2e-3]
    model, expected = make(), make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with make_learner(model) as learner:
        outcomes = [
            learner.step(make_step(learner, group), rate) for group, rate in zip(micro_batches, rates, strict=True)
        ]
    norms = train_with_torchs_adamw(expected, micro_batches, rates)
    assert [float(outcome.grad_norm) for outcome in outcomes] == pytest.approx(norms, rel=1e-5)
    for name, parameter in model.named_parameters():
        truth = expected.get_parameter(name)
        # If a gradient is nearly zero, AdamW's first steps amplify rounding errors.
        close = torch.isclose(parameter, truth, rtol=1e-5, atol=2e-6)
        assert close.double().mean() > 0.999, name
        torch.testing.assert_close(parameter, truth, rtol=0, atol=2e-3)
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))


def test_only_one_gradient_is_in_memory_at_a_time(monkeypatch, updated_in_backward):
    alive, counts = weakref.WeakSet(), []

    def watched(weight, gradient, *arguments, **options):
        alive.add(gradient)
        counts.append(len(alive))
        adamw_(weight, gradient, *arguments, **options)

    monkeypatch.setattr(update_in_backward, "adamw_", watched)
    model = make_llama(num_hidden_layers=6)
    with make_learner(model) as learner:
        learner.step(make_step(learner, EXAMPLES), 1e-3)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert len(counts) == len(list(model.parameters()))
    assert max(counts) == 1


def test_a_backward_pass_that_reads_an_updated_weight_raises():
    class ReadsLate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, dout):
            return dout * ctx.saved_tensors[0], None

    weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    update = UpdateInBackward([weight], RECIPE)
    update.begin(1e-3)
    # The weight's gradient is complete before the first operation's backward pass.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        update.take_gradients((ReadsLate.apply(x, weight.detach()) * weight).sum())


def test_a_warm_up_changes_nothing():
    model = make_llama().bfloat16()
    with make_learner(model) as learner:
        learner.step(make_step(learner, EXAMPLES[:3]), 1e-3)
        update = learner.plain.update
        state = [parameter.detach().clone() for parameter in model.parameters()]
        moments = [value.clone() for moments in update._moments for value in moments]
        random_state = torch.get_rng_state()
        norm = float(update.finish())
        update.take_gradients(0.0 * learner.row_losses(outlined(learner, EXAMPLES[3:]))[0].sum(), is_warming_up=True)
        assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))
        after = [value for moments in update._moments for value in moments]
        assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
        assert any(value.any() for value in after)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert float(update.finish()) == norm
        assert all(parameter.grad is None for parameter in model.parameters())
        learner.step(make_step(learner, EXAMPLES[3:]), 1e-3)
        assert not all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("method", "dtype", "kind"),
    [("full", torch.bfloat16, UpdateInBackward), ("full", torch.float32, Update), ("lora", torch.float32, Update)],
)
def test_only_whole_models_in_bf16_are_updated_in_the_backward_pass(method, dtype, kind):
    with make_learner(make_llama().to(dtype), recipe=RECIPE.replace(method=method)) as learner:
        assert type(learner.plain.update) is kind


@pytest.mark.slow
def test_a_bf16_model_learns_as_well_as_in_fp32():
    def losses(dtype, recipe):
        events = []
        model = make_llama().to(dtype)
        with make_learner(model, events.append, recipe) as learner:
            train(Trainer(learner, recipe, events.append, "train"), EXAMPLES, EXAMPLES)
        return [event.loss for event in events if isinstance(event, Evaluated)]

    recipe = RECIPE.replace(learning_rate=1e-2, epochs=8, patience=8)
    in_bf16, in_fp32 = losses(torch.bfloat16, recipe), losses(torch.float32, recipe)
    assert in_fp32[-1] < in_fp32[0] - 1
    assert in_bf16[-1] == pytest.approx(in_fp32[-1], rel=0.05)


@pytest.mark.slow
def test_every_micro_batch_is_a_step_after_one_notice():
    events = []
    with make_learner(make_llama().bfloat16(), events.append) as learner:
        limit_rows(learner, 70)
        progress = train(Trainer(learner, RECIPE, events.append, "train"), EXAMPLES, [])
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == progress.steps == progress.total_steps >= 6
    assert steps[-1].tokens == 2 * sum(len(example.input_ids) for example in EXAMPLES)
    assert steps[-1].learning_rate < 0.1 * RECIPE.learning_rate
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert "at most 70 rows" in notice.message


def test_after_a_non_finite_loss_the_best_state_is_restored():
    model = make_llama().bfloat16()

    def poison(event):
        if isinstance(event, StepDone) and event.epoch == 2:
            with torch.no_grad():
                model.model.norm.weight.fill_(float("nan"))

    with make_learner(model) as learner:
        trainer = Trainer(learner, RECIPE.replace(batch_tokens=60), poison, "train")
        with pytest.raises(NonFiniteLoss):
            train(trainer, EXAMPLES, EXAMPLES)
        expected = trainer.progress.best_state
        assert all(torch.equal(a, b) for a, b in zip(expected, snapshot(learner.adaptation), strict=True))
        assert all(parameter.isfinite().all() for parameter in model.parameters())
