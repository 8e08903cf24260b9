"""Training counts every token once, keeps the best state, and leaves a good state after a stop."""

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F
from builders import WORDS, evaluated, limit_rows, make_examples, make_llama, outlined, refuse_hoisting, train
from transformers import AutoModelForCausalLM, RwkvConfig, XGLMConfig

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import attach, snapshot, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.evaluation import evaluate
from sebp_edge.engine.training.loop import Trainer
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.engine.training.update import Update
from sebp_edge.errors import NonFiniteLoss
from sebp_edge.events import Evaluated, Notice, StepDone, silent
from sebp_edge.lessons.examples import encode
from sebp_edge.research import learning_rates
from sebp_edge.values.documents import Document
from sebp_edge.values.example import outlines

RECIPE = Recipe(name="test", description="", r=4, learning_rate=5e-3, epochs=3, batch_tokens=120, context_length=64)
CPU = torch.device("cpu")


@pytest.fixture
def examples(base):
    order = random.Random(0)
    documents = [Document(f"text {n}", " ".join(order.choices(WORDS, k=24)) + ".") for n in range(16)]
    return encode(documents, base.tokenizer, 64)[0]


def make_trainer(base, examples, recipe=RECIPE, on_event=silent, seed=0):
    adaptation = attach(base, recipe, seed)
    learner = RecoveringLearner(adaptation, recipe, examples, Collator(64, base.pad_token_id), on_event)
    return Trainer(learner, recipe, on_event, "train")


def test_training_lowers_the_held_out_loss(base, examples):
    events = []
    trainer = make_trainer(base, examples, on_event=events.append)
    with trainer.learner as learner:
        before = evaluate(learner, evaluated(learner, examples[12:])).mean
        progress = train(trainer, examples[:12], examples[12:])
        after = evaluate(learner, evaluated(learner, examples[12:])).mean
    assert after < before - 0.05
    assert after == pytest.approx(progress.best_loss)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == progress.steps == progress.total_steps
    assert steps[-1].tokens == 3 * sum(len(example.input_ids) for example in examples[:12])
    assert [event.epoch for event in events if isinstance(event, Evaluated)] == [0, 1, 2, 3]


def test_a_steps_micro_batches_take_the_longest_examples_first(base, examples, micro_batches):
    trainer = make_trainer(base, examples, RECIPE.replace(batch_tokens=10**6, epochs=1))
    limit_rows(trainer.learner, 120)
    with trainer.learner:
        progress = train(trainer, examples, [])
    assert progress.steps == 1
    lengths = [[example.num_active_tokens for example in micro_batch] for micro_batch in micro_batches]
    assert lengths == [
        [example.num_active_tokens for example in micro_batch.examples]
        for micro_batch in trainer.learner.limit.cut(outlined(trainer.learner, examples))
    ]
    assert len(lengths) > 3
    together = [length for micro_batch in lengths for length in micro_batch]
    assert together == sorted((example.num_active_tokens for example in examples), reverse=True)
    assert all(len(micro_batch) > 1 and sum(micro_batch) <= 120 for micro_batch in lengths[:-1])


def test_learning_rates_warm_up_and_decay_to_nearly_zero():
    rates = list(learning_rates(RECIPE, 20))
    assert rates[0] == pytest.approx(RECIPE.learning_rate / 2)
    assert max(rates) == pytest.approx(RECIPE.learning_rate)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert (rates[2], rates[11]) == pytest.approx((RECIPE.learning_rate, RECIPE.learning_rate / 2))
    assert rates[-1] == pytest.approx(0, abs=0.01 * RECIPE.learning_rate)


@pytest.mark.parametrize("large", [2**30, 0])
def test_an_update_equals_torchs_adamw_and_release_separates_the_parameters(limit_gradients, large):
    limit_gradients(large)
    draw = torch.Generator().manual_seed(0)
    first = [torch.randn(size, generator=draw) for size in [(3, 5), (1,), (70,), (16, 64)]]
    gradients = [[torch.randn(value.shape, generator=draw) for value in first] for _ in range(3)]
    expected, found = ([torch.nn.Parameter(value.clone()) for value in first] for _ in range(2))
    recipe = RECIPE.replace(weight_decay=0.1, max_grad_norm=2.0)
    optimizer = torch.optim.AdamW(expected, lr=1e-2, weight_decay=0.1)
    update = Update(found, recipe)
    for step in gradients:
        for parameter, gradient in zip(expected, step, strict=True):
            parameter.grad = gradient.clone()
        for parameter, gradient in zip(found, step, strict=True):
            parameter.grad.add_(gradient)
        norm = torch.nn.utils.clip_grad_norm_(expected, 2.0)
        optimizer.step()
        update.begin(1e-2)
        torch.testing.assert_close(update.finish(), norm)
        assert not any(parameter.grad.any() for parameter in found)
    update.release()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.grad is None
        assert one.untyped_storage().nbytes() == one.nbytes


@pytest.mark.parametrize("large", [2**30, 0])
def test_an_update_of_weights_in_bf16_moves_them_and_gives_the_gradients_norm(limit_gradients, large):
    limit_gradients(large)
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=draw).bfloat16()) for size in (3, 700)]
    before = [parameter.detach().clone() for parameter in parameters]
    update = Update(parameters, RECIPE)
    for parameter in parameters:
        parameter.grad.copy_(torch.randn(parameter.shape, generator=draw))
    norm = torch.cat([parameter.grad.double() for parameter in parameters]).norm()
    update.begin(1e-1)
    torch.testing.assert_close(update.finish().double(), norm, rtol=1e-2, atol=0.0)
    assert all((one != other).any() for one, other in zip(parameters, before, strict=True))
    update.release()


@pytest.mark.parametrize("patience", [1, 2])
def test_training_stops_early_and_restores_the_best_state(base, examples, patience):
    # The steps are too small to change a loss, so no epoch is better than the start.
    no_progress = RECIPE.replace(learning_rate=1e-30, epochs=8, patience=patience)
    trainer = make_trainer(base, examples, recipe=no_progress)
    before = snapshot(trainer.learner.adaptation)
    with trainer.learner:
        progress = train(trainer, examples[:12], examples[12:])
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(trainer.learner.adaptation), strict=True))
    assert progress.best_epoch == 0
    assert progress.steps == patience * progress.total_steps // 8


def test_a_non_finite_loss_raises_an_error_that_names_the_step_and_restores_the_best_state(base, examples):
    class Poison:
        def __call__(self, event):
            if isinstance(event, Evaluated) and event.epoch == 1:
                self.best = snapshot(trainer.learner.adaptation)
                trainable(trainer.learner.adaptation)[0].data.fill_(math.nan)

    poison = Poison()
    trainer = make_trainer(base, examples, on_event=poison)
    with trainer.learner, pytest.raises(NonFiniteLoss, match=r"step \d+, the loss is nan"):
        train(trainer, examples[:12], examples[12:])
    assert all(torch.equal(a, b) for a, b in zip(poison.best, snapshot(trainer.learner.adaptation), strict=True))


@pytest.mark.slow
def test_the_error_for_overflowing_gradients_names_a_first_token_with_a_zero_embedding(base, examples):
    # In each of the layers, norms multiply the gradient of a row of zeros by 1 / sqrt(eps).
    deep = dataclasses.replace(base, model=make_llama(num_hidden_layers=8, rms_norm_eps=1e-18))
    first = examples[0].input_ids[0]
    deep.model.get_input_embeddings().weight.data[first] = 0.0
    trainer = make_trainer(deep, examples)
    with trainer.learner, pytest.raises(NonFiniteLoss, match=rf"step \d+, .* the embedding of token {first} is zero"):
        train(trainer, examples[:12], examples[12:])


@pytest.mark.parametrize("when", ["before the first evaluation", "after it"])
def test_an_interruption_leaves_the_best_state_or_before_one_the_current_state(base, examples, when):
    before = when.startswith("before")

    def interrupt(event):
        if isinstance(event, StepDone) and (event.step == 2 if before else event.epoch == 2):
            raise KeyboardInterrupt

    trainer = make_trainer(base, examples, on_event=interrupt)
    start = snapshot(trainer.learner.adaptation)
    with trainer.learner, pytest.raises(KeyboardInterrupt):
        train(trainer, examples[:12], examples[12:])
    state = snapshot(trainer.learner.adaptation)
    assert not all(torch.equal(a, b) for a, b in zip(start, state, strict=True))
    assert trainer.progress.best_epoch == (0 if before else 1)
    best_is_kept = all(torch.equal(a, b) for a, b in zip(trainer.progress.best_state, state, strict=True))
    assert best_is_kept is not before


def test_a_model_that_cannot_be_hoisted_trains_padded_after_a_notice(base, examples):
    model = make_llama().eval()
    refuse_hoisting(model)
    notices = []
    with RowLosses(model, examples, Collator(64, 2), CPU, notices.append) as rows:
        losses, sequences = rows(outlines(examples[:3]))
    assert not rows.hoisted
    assert "s_aux" in notices[0].message
    assert len(losses) == sum(example.num_loss_tokens for example in examples[:3])
    assert sequences.unique().tolist() == [0, 1, 2]


def test_a_model_that_leaks_between_examples_is_not_hoisted(examples):
    model = make_llama().eval()
    # Without the sequence lengths, attention crosses examples.
    forward = model.model.layers[1].self_attn.forward

    def leaking(*args, cu_seq_lens_q=None, **kwargs):
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q[[0, -1]]
        return forward(*args, **kwargs)

    model.model.layers[1].self_attn.forward = leaking
    notices = []
    with RowLosses(model, examples, Collator(64, 2), CPU, notices.append) as rows:
        assert not rows.hoisted
    assert isinstance(notices[0], Notice)
    assert "read each other" in notices[0].message
    times = len(examples) * 64 / sum(example.num_active_tokens for example in examples)
    assert f"takes about {times:.1f} times as long: " in notices[0].message


# Models that mix rows outside transformers' attention: by their own attention, or a recurrent state.
# Comparing losses does not detect this, since it hardly changes the losses of an untrained model.
MIXING_ROWS = {
    "gradients of a small copy differ": XGLMConfig(
        vocab_size=320, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4
    ),
    "ZeroPad2d": RwkvConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, context_length=64),
}


@pytest.mark.parametrize("reason", MIXING_ROWS)
def test_a_model_that_mixes_rows_outside_its_attention_is_not_hoisted(reason):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MIXING_ROWS[reason], attn_implementation="eager").eval()
    examples, notices = make_examples((11, 5, 20)), []
    with RowLosses(model, examples, Collator(24, 2), CPU, notices.append) as rows:
        assert rows.hoisted is None
        found, _ = rows(outlines(examples))
    assert reason in notices[0].message
    expected = []
    for example in examples:
        ids = torch.tensor(example.input_ids)
        expected.append(F.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:], reduction="none"))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "eager"
