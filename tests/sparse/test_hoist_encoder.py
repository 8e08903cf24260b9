"""Hoisted encoders: the padded model's losses, gradients and dropout, and no sequence depends on another."""

import copy

import pytest
import torch
from against_dense import assert_same_gradients
from builders import (
    ENCODER_HEADS,
    ENCODER_SIZES,
    IGNORE,
    checkpoint_activations,
    make_encoder,
    make_encoder_batch,
    make_llama,
    seeded,
)
from model_families import FAMILIES, WIDER
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel
from transformers.modeling_outputs import SequenceClassifierOutput

from sebp_edge.errors import SparsityError
from sebp_edge.research import HoistedEncoder


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=ENCODER_HEADS)
def head(request):
    return request.param


# Each family and each head, where the one does not depend on the other.
EACH_ONCE = [*zip(FAMILIES, ENCODER_HEADS, strict=True)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(model, batch, tolerance=1e-5):
    expected = model(**batch).loss
    wanted = gradients(model, expected)
    with HoistedEncoder(model) as hoisted:
        found = hoisted.losses(batch).mean()
        gradient = gradients(model, found)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)
    assert_same_gradients(wanted, gradient, tolerance, 0.1 * tolerance)


@pytest.mark.parametrize(
    ("family", "head", "adapt", "dtype"),
    [
        *((family, head, "full", torch.float64) for family in FAMILIES for head in ENCODER_HEADS),
        *((*each, "lora", torch.float32) for each in EACH_ONCE),
    ],
)
def test_losses_and_gradients_are_the_padded_dense_ones(family, head, adapt, dtype):
    model = make_encoder(family, head)
    if adapt == "lora":
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    assert_same_training(model.to(dtype), make_encoder_batch(family, head))


@pytest.mark.parametrize(("task", "dropout"), [("SEQ_CLS", 0.2), ("TOKEN_CLS", 0.0)])
def test_adapters_with_a_trained_head_train_like_dense(family, task, dropout):
    targets = ["query", "value", "q_lin", "v_lin"]
    config = LoraConfig(r=3, task_type=task, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
    head = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}[task]
    # In evaluation mode, where a LoRA layer with dropout runs PEFT's code and drops nothing.
    model = get_peft_model(make_encoder(family, head), config).double().eval()
    assert_same_training(model, make_encoder_batch(family, head))


@pytest.mark.parametrize("lengths", [(1,), (20,), (1, 1, 1), (20, 3, 20, 1, 7)])
def test_batches_of_any_lengths_train_like_dense(head, lengths):
    # The middle token of three has no label; a batch without any label has no loss.
    family = FAMILIES[len(lengths) % len(FAMILIES)]
    assert_same_training(make_encoder(family, head).double(), make_encoder_batch(family, head, lengths))


@pytest.mark.parametrize(
    ("family", "labels"),
    list(zip(FAMILIES, ([0.5, -2.0, 100.0, 3.0], [[1.0], [2.0], [3.0], [-100.0]], [1, 0, 5, 2]), strict=True)),
)
def test_a_regression_trains_like_dense(family, labels):
    model = make_encoder(family, "sequence", num_labels=1).double()
    batch = make_encoder_batch(family, "sequence") | {"labels": torch.tensor(labels)}
    # The dense model's loss does not take integer targets.
    dense = batch | {"labels": batch["labels"].double()}
    wanted = gradients(model, model(**dense).loss)
    with HoistedEncoder(model) as hoisted:
        found = gradients(model, hoisted.losses(batch).mean())
    assert_same_gradients(wanted, found, noise=1e-6)


def test_sequences_without_a_label_have_no_loss(family):
    batch = make_encoder_batch(family, "sequence")
    batch["labels"][1] = IGNORE
    assert_same_training(make_encoder(family, "sequence").double(), batch)


def test_padding_may_be_anywhere_if_the_head_reads_labelled_tokens(family):
    batch = make_encoder_batch(family, "token", (20, 20, 20))
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, :7], mask[1, 5:9], mask[2, ::2] = 0, 0, 0
    batch = batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORE)}
    assert_same_training(make_encoder(family, "token").double(), batch)


@pytest.mark.parametrize(("family", "head"), EACH_ONCE)
def test_a_sequence_never_depends_on_its_neighbour(family, head):
    model, batch = make_encoder(family, head), make_encoder_batch(family, head)
    secret = batch | {"input_ids": batch["input_ids"].clone()}
    secret["input_ids"][2, :16] = torch.arange(100, 116)
    table = model.get_input_embeddings().weight
    with HoistedEncoder(model) as hoisted:
        others = hoisted.tokens(batch).sequences != 2

        def seen(batch):
            losses = hoisted.losses(batch)
            return losses.detach(), torch.autograd.grad(losses[others].sum(), table)[0]

        (before, gradient), (after, gradient_after) = seen(batch), seen(secret)
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])
    assert torch.equal(gradient, gradient_after)


@pytest.mark.parametrize("sizes", [(64, 8, 32, 40), (33, 4, 16, 33), (200, 5, 16, 70)])
def test_filler_changes_no_loss_and_no_gradient(head, sizes):
    family = FAMILIES[sizes[0] % len(FAMILIES)]
    model = make_encoder(family, head).double()
    with HoistedEncoder(model) as hoisted:
        tokens = hoisted.tokens(make_encoder_batch(family, head))
        expected = hoisted.row_losses(tokens)
        wanted = gradients(model, expected.mean())
        bucket = tokens.sizes._make(sizes)
        filled = tokens.filled(bucket)
        losses = hoisted.row_losses(filled)
        found = gradients(model, (filled.weighted(1 / len(expected)).weights * losses).sum())
    assert filled.sizes == bucket._replace(sequences=bucket.slots)
    torch.testing.assert_close(losses[filled.weights > 0], expected)
    assert_same_gradients(wanted, found, noise=1e-6)


@pytest.mark.parametrize(("family", "head"), EACH_ONCE)
def test_after_the_last_attention_only_rows_that_the_head_reads_are_computed(family, head):
    model, batch = make_encoder(family, head), make_encoder_batch(family, head)
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    seen = {}
    for number, block in enumerate(blocks):
        norm = getattr(block, "output_layer_norm", None) or block.output.LayerNorm
        norm.register_forward_hook(lambda _, inputs, __, number=number: seen.update({number: inputs[0].shape[:2]}))
    with torch.no_grad(), HoistedEncoder(model) as hoisted:
        losses = hoisted.losses(batch)
    assert seen == {0: (1, 33), 1: (len(losses), 1)}
    assert len(losses) == int((batch["labels"] != IGNORE).sum())


@pytest.mark.parametrize(("family", "head"), EACH_ONCE)
def test_removing_restores_the_model(family, head):
    model, batch = make_encoder(family, head).eval(), make_encoder_batch(family, head)
    before = model(**batch)
    with HoistedEncoder(model) as hoisted:
        hoisted.losses(batch)
        with pytest.raises(SparsityError, match="called directly instead of through its handle"):
            model(**batch)
    hoisted.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(before.logits, model(**batch).logits)


@pytest.mark.parametrize(("family", "head"), EACH_ONCE)
def test_gradients_under_bf16_autocast_err_no_more_than_dense(family, head):
    model, batch = make_encoder(family, head), make_encoder_batch(family, head)
    exact = gradients(model, model(**batch).loss)
    with torch.autocast("cpu", torch.bfloat16):
        dense = gradients(model, model(**batch).loss)
        with HoistedEncoder(model) as hoisted:
            found = gradients(model, hoisted.losses(batch).mean())
    largest = max(gradient.norm() for gradient in exact.values())
    for name, truth in exact.items():
        allowed = 2 * (dense[name] - truth).norm() + 1e-2 * truth.norm() + 1e-3 * largest
        assert (found[name] - truth).norm() <= allowed, name


DRAWS, COPIES = 400, 40


def logits_by_dropout(model, batch, hoisted):
    """Returns the logits of many random draws, [draws, B, L], from batches of copies."""
    copies = {name: values.repeat(COPIES, *[1] * (values.dim() - 1)) for name, values in batch.items()}
    with torch.no_grad():
        if hoisted:
            with HoistedEncoder(model) as rows:
                tokens = rows.tokens(copies)
                logits = [rows.row_logits(tokens) for _ in range(DRAWS // COPIES)]
        else:
            copies.pop("labels")
            logits = [model(**copies).logits for _ in range(DRAWS // COPIES)]
    return torch.cat(logits).unflatten(0, (DRAWS, len(batch["input_ids"])))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention_only"), [("distilbert", True), ("roberta", True), ("bert", False)])
def test_dropout_has_the_padded_models_distribution(family, attention_only):
    drop = {"attention_dropout" if family == "distilbert" else "attention_probs_dropout_prob": 0.5}
    model = make_encoder(family, "sequence", **drop) if attention_only else make_encoder(family, "sequence", 0.3)
    batch = make_encoder_batch(family, "sequence", (9, 3, 16))
    with seeded(5):
        dense, found = (logits_by_dropout(model, batch, hoisted) for hoisted in (False, True))
    assert float(dense.std(dim=0).min()) > 0
    # Five standard errors of a difference of means; of deviations, about five of theirs.
    error = ((dense.var(dim=0) + found.var(dim=0)) / DRAWS).sqrt()
    assert bool(((dense.mean(dim=0) - found.mean(dim=0)).abs() <= 5 * error).all())
    torch.testing.assert_close(found.std(dim=0), dense.std(dim=0), rtol=0.25, atol=0.0)


def changed(head="sequence", **changes):
    batch = make_encoder_batch("bert", head) | changes
    return {name: values for name, values in batch.items() if values is not None}


REFUSED = {
    "no labels": (lambda: changed(labels=None), "expected input_ids and labels, and optionally"),
    "own positions": (lambda: changed(position_ids=torch.zeros(4, 20)), "The batch has .*position_ids; expected"),
    "lists": (lambda: changed(labels=[0, 1, 2, 0]), "labels is a list; expected a tensor"),
    "one text": (
        lambda: {"input_ids": torch.zeros(3), "labels": torch.zeros(3)},
        r"input_ids has shape \(3,\); expected \[sequences, positions\]",
    ),
    "a mask for attention": (lambda: changed(attention_mask=torch.ones(4, 1, 20, 20)), r"attention_mask .* \(4, 20\)"),
    "labels of another batch": (lambda: changed(labels=torch.zeros(3)), r"labels has shape \(3,\)"),
    "labels of tokens": (lambda: changed("token"), r"labels has shape \(4, 20\); expected \(4,\) or \(4, 1\)"),
    "a label too large": (lambda: changed(labels=torch.tensor([0, 1, 3, 2])), "expected whole numbers from 0 to 2"),
    "a negative label": (lambda: changed(labels=torch.tensor([0, 1, -1, 2])), "expected whole numbers from 0 to 2"),
    "half a label": (lambda: changed(labels=torch.tensor([0.5, 1, 0, 2])), "expected whole numbers from 0 to 2"),
    "padding on the left": (
        lambda: changed(attention_mask=torch.tensor([[0] + [1] * 19] * 4)),
        "The first token of a sequence, which the head reads, is padding",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_of_another_form_are_refused(case):
    make, message = REFUSED[case]
    with HoistedEncoder(make_encoder("bert", "sequence")) as hoisted, pytest.raises(SparsityError, match=message):
        hoisted.losses(make())


def test_labelled_padding_is_refused():
    batch = changed("token", labels=torch.zeros(4, 20, dtype=torch.int64))
    with (
        HoistedEncoder(make_encoder("bert", "token")) as hoisted,
        pytest.raises(SparsityError, match="A label is on padding, where the attention mask is 0"),
    ):
        hoisted.losses(batch)


def test_texts_longer_than_the_position_table_are_refused(family):
    model = make_encoder(family, "sequence", max_position_embeddings=24)
    with HoistedEncoder(model) as hoisted:
        hoisted.losses(make_encoder_batch(family, "sequence", (3, 20), 300))
        with pytest.raises(SparsityError, match="the model has 24 positions; truncate"):
            hoisted.losses(make_encoder_batch(family, "sequence", (3, 25), 300))


def test_other_models_are_refused():
    encoder = BertModel(BertConfig(**ENCODER_SIZES))
    for model in (make_llama(), encoder):
        with pytest.raises(SparsityError, match=f"{type(model).__name__} is not BERT, RoBERTa or DistilBERT"):
            HoistedEncoder(model)
    several = make_encoder("bert", "sequence", problem_type="multi_label_classification")
    with pytest.raises(SparsityError, match="has one label per sequence"):
        HoistedEncoder(several)


class MeanBertForSequenceClassification(BertForSequenceClassification):
    """A head that reads more than the first token."""

    def forward(self, **inputs):
        hidden_BTD = self.bert(**inputs).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(hidden_BTD.mean(dim=1)))


def test_a_head_that_reads_other_tokens_is_refused_and_unchanged():
    model = MeanBertForSequenceClassification(BertConfig(**ENCODER_SIZES, num_labels=3))
    with pytest.raises(SparsityError, match="cannot be hoisted, use sparsify instead: results differ by"):
        HoistedEncoder(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_is_refused(family, use_reentrant):
    model = make_encoder(family, "sequence")
    checkpoint_activations(model, use_reentrant)
    with (
        HoistedEncoder(model) as hoisted,
        pytest.raises(SparsityError, match="does not support gradient checkpointing"),
    ):
        hoisted.losses(make_encoder_batch(family, "sequence")).mean().backward()


def test_a_hook_that_mixes_rows_is_refused_when_it_is_added():
    model, batch = make_encoder("bert", "token"), make_encoder_batch("bert", "token")
    with HoistedEncoder(model) as hoisted:
        hoisted.losses(batch)
        model.bert.encoder.layer[0].intermediate.register_forward_hook(
            lambda module, inputs, output: output + output.mean(dim=(0, 1))
        )
        with pytest.raises(SparsityError, match="use sparsify instead: results differ"):
            hoisted.losses(batch)


# Runs on our own kernels, and for some lengths on torch's flash attention.
@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(90, 1, 128, 33), (200, 17, 129, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_on_a_gpu_err_no_more_than_dense(family, head, lengths, dtype):
    model = make_encoder(family, head, **WIDER[family]).to("cuda", dtype)
    batch = {name: values.cuda() for name, values in make_encoder_batch(family, head, lengths, 240).items()}
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model(**batch).loss)
    dense = gradients(model, model(**batch).loss)
    with HoistedEncoder(model) as hoisted:
        found = gradients(model, hoisted.losses(batch).mean())
    largest = max(gradient.norm() for gradient in exact.values())
    for name, truth in exact.items():
        allowed = 2 * (dense[name] - truth).norm() + 1e-2 * truth.norm() + 1e-4 * largest
        assert (found[name] - truth).norm() <= allowed, name


class PenalisedForTokenClassification(BertForTokenClassification):
    """Named like a head that reads labelled tokens only, with a penalty on other hidden states or logits."""

    def __init__(self, config, penalty):
        super().__init__(config)
        self.penalty = penalty

    def forward(self, *args, labels=None, **inputs):
        output = super().forward(*args, labels=labels, **inputs, output_hidden_states=True)
        if labels is not None:
            output.loss = output.loss + 0.1 * self.penalty(output)
        return output


@pytest.mark.parametrize(
    "penalty",
    [
        lambda output: output.hidden_states[1].abs().mean(),
        lambda output: (output.logits[:, 1:] * output.logits[:, :-1]).sum(-1).square().mean(),
    ],
    ids=["hidden states", "neighbours' logits"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_another_loss_is_refused(penalty, dtype):
    config = make_encoder("bert", "token").config
    torch.manual_seed(0)
    model = PenalisedForTokenClassification(config, penalty).to(dtype)
    # As large as after some training.
    model.classifier.weight.data *= 30
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SparsityError, match="its loss is not that of its logits at the labels"):
        HoistedEncoder(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())
