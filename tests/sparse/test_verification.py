"""Rows that labels and masks exclude are skipped after a backward pass has verified that they carry no gradient."""

import logging

import pytest
import torch
from against_dense import assert_same, encoder_batch, padded_batch, with_lora
from builders import IGNORE, SIZES, make_llama, seeded
from model_families import ENCODERS
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.ops import detect


class MeanPooledForSequenceClassification(BertForSequenceClassification):
    """Named like a head that reads the first token, but reads all of them."""

    def forward(self, input_ids, attention_mask, labels=None, **inputs):
        hidden_BTD = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mask_BT1 = attention_mask[..., None].to(hidden_BTD.dtype)
        logits = self.classifier((hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class CoupledForTokenClassification(BertForTokenClassification):
    """Named like a head that reads labelled tokens alone, but scores neighbours together, as a CRF does."""

    def forward(self, input_ids, attention_mask, labels=None, **inputs):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        real_BT = attention_mask.bool()
        pairs = (output.logits[:, 1:] * output.logits[:, :-1]).sum(-1)[real_BT[:, 1:]]
        output.loss = output.loss + 0.1 * pairs.square().mean()
        return output


class RolledForTokenClassification(BertForTokenClassification):
    """Adds each embedding to that of the next token, and the last one, possibly of padding, to the first."""

    def forward(self, input_ids, attention_mask, labels=None, **inputs):
        embedded = self.get_input_embeddings()(input_ids)
        embedded = embedded + embedded.roll(1, dims=1)
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels)


class PenalisedForCausalLM(LlamaForCausalLM):
    """Named like a causal decoder, with a penalty on hidden states of all rows, including padding."""

    def forward(self, input_ids, labels=None, **inputs):
        output = super().forward(input_ids=input_ids, labels=labels, output_hidden_states=True, **inputs)
        output.loss = output.loss + 1e-2 * output.hidden_states[-2].square().mean()
        output.hidden_states = None
        return output


def make(kind, config):
    with seeded(0):
        return kind(config).double().train()


def train(model, batch, loss_of=lambda output: output["loss"]):
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def bert(kind):
    config = ENCODERS["bert"]()
    config.num_labels = 3
    return make(kind, config)


def on_logits(output):
    return output.loss + output.logits.square().mean()


CASES = {
    "another loss on logits": (lambda: make_llama().double(), {}, on_logits),
    "another loss on logits, LoRA": (lambda: with_lora(make_llama()), {}, on_logits),
    "mean pooling": (lambda: bert(MeanPooledForSequenceClassification), {"labels": torch.tensor([0, 2, 1, 1])}, None),
    "coupled tokens": (lambda: bert(CoupledForTokenClassification), encoder_batch(None), None),
    "rolled embeddings": (lambda: bert(RolledForTokenClassification), encoder_batch(None), None),
    "penalty on hidden states": (lambda: make(PenalisedForCausalLM, LlamaConfig(**SIZES)), {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_excluded_rows_that_carry_gradient_are_computed_from_the_first_pass_on(case, caplog):
    make_model, others, loss_of = CASES[case]
    model, batch = make_model(), padded_batch(prompt=5) | others
    loss_of = loss_of or (lambda output: output["loss"])
    dense = train(model, batch, loss_of)
    with sparsify(model, keep_logits=True), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same(dense, train(model, batch, loss_of), tolerance=1e-9)
    assert caplog.text.count("From now on, active rows are detected in the backward pass") == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_whose_gradients_overflow_changes_nothing_about_later_ones(first, caplog):
    model, batch = make_llama(), padded_batch(prompt=5)
    dense = train(model, batch)
    with sparsify(model) as sparsified, caplog.at_level(logging.WARNING):
        if not first:
            train(model, batch)
        _, overflown = train(model, batch, lambda output: output.loss * 1e30 * 1e30)
        assert not all(gradient.isfinite().all() for gradient in overflown.values())
        for _ in range(2):
            assert_same(dense, train(model, batch), tolerance=1e-4)
        assert not detects_rows(sparsified, model, batch)
    assert not caplog.text


def test_batches_that_skip_other_kinds_of_rows_are_verified_separately():
    model = make_llama().double()
    whole = padded_batch(lengths=(24, 24, 24))
    padded, with_prompt = padded_batch(), padded_batch(prompt=5)
    with sparsify(model, keep_logits=True) as sparsified:
        for batch in (whole, padded, with_prompt):
            assert detects_rows(sparsified, model, batch), "the first of its kind"
            assert not detects_rows(sparsified, model, batch), "verified"


def test_an_evaluation_verifies_nothing_about_a_training_step():
    model, batch = make_llama().double(), padded_batch()
    with sparsify(model, keep_logits=True) as sparsified:
        model.eval()
        assert detects_rows(sparsified, model, batch)
        model.train()
        assert detects_rows(sparsified, model, batch)


def test_calls_with_a_hook_that_is_added_later_are_verified_again():
    model, batch = make_llama().double(), padded_batch(prompt=5)
    kept = []

    def train_with_penalty():
        kept.clear()
        model.zero_grad()
        loss = model(**batch).loss + 1e-2 * kept[-1].square().mean()
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    def keep(module, inputs, output):
        kept.append(output)  # in trials too, which come first

    handle = model.model.layers[0].register_forward_hook(keep)
    dense = train_with_penalty()
    handle.remove()
    with sparsify(model, keep_logits=True):
        for _ in range(2):
            train(model, batch)
        model.model.layers[0].register_forward_hook(keep)
        for _ in range(2):
            assert_same(dense, train_with_penalty(), tolerance=1e-9)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_later_loss_on_logits_is_refused_and_then_exact(return_dict):
    model, batch = make_llama().double(), padded_batch(prompt=5) | {"return_dict": return_dict}

    def loss_of(output):
        return output[0] + output[1].square().mean()

    dense = train(model, batch, loss_of)
    with sparsify(model, keep_logits=True):
        for _ in range(2):
            train(model, batch, lambda output: output[0])
        with pytest.raises(SparsityError, match="Set all gradients to zero and repeat the step"):
            train(model, batch, loss_of)
        for _ in range(2):
            assert_same(dense, train(model, batch, loss_of), tolerance=1e-9)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("adapt", [lambda model: model, with_lora], ids=["full", "lora"])
def test_a_later_loss_on_captured_hidden_states_is_refused_and_then_exact(keep_logits, adapt):
    model, batch = adapt(make_llama(num_hidden_layers=3).double()).train(), padded_batch()
    block = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    own, kept = block.forward, []
    block.forward = lambda *args, **kwargs: kept.append(own(*args, **kwargs)) or kept[-1]

    def train_on_all_rows():
        kept.clear()
        return train(model, batch, lambda output: output.loss + 1e-2 * kept[-1].square().mean())

    dense = train_on_all_rows()
    with sparsify(model, keep_logits=keep_logits):
        for _ in range(2):
            train(model, batch)
        with pytest.raises(SparsityError, match="gradients of this backward pass are incomplete"):
            train_on_all_rows()
        for _ in range(2):
            assert_same(dense, train_on_all_rows(), tolerance=1e-5)


def test_verified_rows_are_not_detected_in_later_passes():
    head = AutoModelForSequenceClassification
    model, batch = bert(BertForSequenceClassification), encoder_batch(head)
    with sparsify(model) as sparsified:
        # The first pass sets the config's problem type.
        for _ in range(2):
            train(model, batch)
        assert not detects_rows(sparsified, model, batch)


def test_interleaved_passes_train_like_dense_before_and_after_verification():
    model, batch = make_llama().double(), padded_batch(prompt=5)
    other = batch | {"labels": batch["labels"].masked_fill(torch.arange(24) > 9, IGNORE)}

    def gradients():
        model.zero_grad()
        losses = [model(**batch).loss, model(**other).loss]
        for loss in losses:
            loss.backward()
        return sum(losses).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    dense = gradients()
    with sparsify(model):
        for _ in range(3):
            assert_same(dense, gradients(), tolerance=1e-5)


def detects_rows(sparsified, model, batch):
    """Whether all layers of a training step detect their rows; either all or none do."""
    recorded, linear_rows = [], sparsified._linear_rows

    def recording(layers, x):
        recorded.append(linear_rows(layers, x))
        return recorded[-1]

    sparsified._linear_rows = recording
    train(model, batch)
    sparsified._linear_rows = linear_rows
    kinds = {callable(rows) for rows in recorded if rows is not None}
    assert detect not in recorded
    assert len(kinds) == 1
    return kinds.pop()
