"""The drop-in on each family: dense losses and gradients, on the predicted rows or by detection."""

import pytest
import torch
from against_dense import (
    assert_same,
    assert_same_training,
    encoder_batch,
    loss_and_gradients,
    padded_batch,
    record_inputs,
    record_rows,
)
from builders import IGNORE, SIZES, make_llama
from model_families import BERT, DECODERS, ENCODERS, make, make_decoder
from pairwise import pairwise
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BertConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    TrOCRConfig,
    XLMConfig,
    XLNetConfig,
)
from transformers.pytorch_utils import Conv1D

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.ops import detect, sparse_rowwise
from sebp_edge.research import RowPlan

# Their head has a bias, which `linear_cross_entropy` does not take.
KEEP_THEIR_LOSS = ("phi",)


@pytest.fixture(autouse=True)
def sparse_norms_and_activations(monkeypatch):
    """Makes norms and activations skip rows, however few."""
    monkeypatch.setattr("sebp_edge.engine.sparse.sparsify._saves_time", lambda x, rows: True)


def with_lora(model):
    # PEFT needs to know that GPT-2 stores its weights transposed.
    options = {"fan_in_fan_out": model.config.model_type == "gpt2", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", **options)).double()


# Prompts have rows without a loss, which the last layer skips where that is exact; of each kind, one goes without. Of
# each kind of layers, one has an adapter.
@pytest.mark.parametrize(
    ("family", "prompt", "adapt"),
    [
        *((family, 5, "full") for family in DECODERS),
        *((family, 0, "full") for family in ("phi", "gpt2")),
        *((family, 5, "lora") for family in ("gemma3", "phi", "gpt2", "recurrent-gemma")),
        ("qwen3", 0, "lora"),
    ],
)
def test_decoders_train_like_dense_on_predicted_rows_and_make_no_logits(family, adapt, prompt, monkeypatch):
    if "gemma" in family:
        # Their norms compute in fp32, whatever the model's dtype, and sum their weights' gradients in it. Positions,
        # which are whole numbers, stay fp32: transformers 5.17 multiplies matrices of them and of fp32 frequencies.
        own = torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x.double() if x.is_floating_point() else own(x))
    model = make_decoder(family)
    model, batch = with_lora(model) if adapt == "lora" else model, padded_batch(prompt=prompt)
    dense = loss_and_gradients(model, batch)
    for keep_logits, tolerance in ((True, 1e-10), (False, 1e-5)):
        with sparsify(model, keep_logits=keep_logits) as sparsified:
            assert_same(dense, loss_and_gradients(model, batch), tolerance)  # verifies the rows
            recorded = record_rows(sparsified)
            assert_same(dense, loss_and_gradients(model, batch), tolerance)
            # Fused adapters record nothing.
            assert detect not in recorded and (recorded or adapt == "lora")
            # Logits are made where no loss is to be learnt.
            with_gradients, evaluated = model(**batch), model.eval()(**batch)
            with torch.no_grad():
                without = model.train()(**batch)
        assert (with_gradients.logits is None) == (not keep_logits and family not in KEEP_THEIR_LOSS)
        assert without.logits is not None and evaluated.logits is not None


# Families whose last layer has q_proj, o_proj and mlp; in the others, it computes all rows.
RESTRICTED = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "cohere")


@pytest.mark.parametrize("family", [*RESTRICTED, "phi", "phi3", "gpt2", "gpt-neox"])
def test_the_last_layer_computes_only_loss_rows_if_that_is_exact(family):
    model, batch = make_decoder(family), padded_batch(prompt=5)
    loss_rows = int((batch["labels"][:, 1:] != IGNORE).sum())
    blocks = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
    inside = next(layer for layer in blocks[-1].mlp.modules() if isinstance(layer, torch.nn.Linear | Conv1D))
    seen = []
    with sparsify(model):
        # Not by a hook, since a hook in the last layer makes it compute all rows.
        record_inputs(inside, seen)
        for _ in range(2):  # the first pass verifies the rows
            model(**batch).loss.backward()
    assert seen[-1].numel() == (loss_rows if family in RESTRICTED else batch["input_ids"].numel())


@pairwise(
    head=[AutoModelForSequenceClassification, AutoModelForTokenClassification],
    padding=["right", "left", "none", "no mask"],
    family=ENCODERS.keys(),
    adapt=["full", "lora"],
)
def test_encoders_train_like_dense(family, head, padding, adapt):
    model, batch = make(head, ENCODERS[family]()), encoder_batch(head, padding)
    if adapt == "lora":
        model = with_lora(model)
    assert_same_training(model, batch)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_no_row_that_an_encoder_skips_has_a_gradient(family, head, verified_rows):
    model, batch = make(head, ENCODERS[family]()), encoder_batch(head)
    with sparsify(model) as sparsified:
        model(**batch).loss.backward()  # verifies the rows
        recorded = record_rows(sparsified)
        model(**batch).loss.backward()
    real = int(batch["attention_mask"].sum())
    read = 4 if head is AutoModelForSequenceClassification else int((batch["labels"] != IGNORE).sum())
    assert not any(rows is detect for rows in recorded)
    assert {len(rows.ids) for rows in recorded if rows is not None} == {real, read}


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (AutoModelForMaskedLM, {"labels": padded_batch()["labels"]}),
        (
            AutoModelForQuestionAnswering,
            {"start_positions": torch.ones(4).long(), "end_positions": torch.ones(4).long()},
        ),
    ],
    ids=["masked words", "questions"],
)
@pytest.mark.parametrize("family", ENCODERS)
def test_other_heads_of_encoders_train_like_dense(family, head, labels):
    config, batch = ENCODERS[family](), padded_batch()
    config.num_labels = 2
    model = make(head, config)
    del batch["labels"]
    assert_same_training(model, batch | labels)


@pytest.mark.parametrize("causal", [True, False])
def test_an_encoders_causal_head_trains_like_dense_causal_or_not(causal):
    model = make(AutoModelForCausalLM, BertConfig(**BERT, is_decoder=causal, use_cache=False))
    batch = padded_batch()
    batch["labels"][:, 6:] = IGNORE
    assert_same_training(model, batch)


def test_a_decoders_classifier_trains_like_dense():
    batch = padded_batch() | {"labels": torch.tensor([0, 2, 1, 1])}
    config = Qwen3Config(**SIZES, head_dim=8, num_labels=3)
    assert_same_training(make(AutoModelForSequenceClassification, config), batch)


@pytest.mark.parametrize(("chosen", "experts"), [(4, "eager"), (1, "grouped_mm"), (1, "eager")])
def test_experts_that_get_as_many_rows_as_the_batch_train_like_dense(chosen, experts):
    sizes = {"num_experts": 4, "num_experts_per_tok": chosen, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    model = make(AutoModelForCausalLM, Qwen3MoeConfig(**SIZES, head_dim=8, **sizes)).float()
    model.set_experts_implementation(experts)
    batch = padded_batch(prompt=5)
    dense = loss_and_gradients(model, batch)
    with sparsify(model, keep_logits=True):
        assert_same(dense, loss_and_gradients(model, batch), tolerance=2e-5)


HALF = {"vocab_size": 320, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
XLM = {"vocab_size": 320, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
# Causal by name, but their labels are not the next tokens, or their rows depend on later tokens.
CAUSAL_BY_NAME = {
    "bart": lambda: BartConfig(**HALF, dropout=0.0, is_decoder=True, is_encoder_decoder=False),
    "trocr": lambda: TrOCRConfig(**HALF, dropout=0.0),
    "xlm": lambda: XLMConfig(**XLM),
    "xlnet": lambda: XLNetConfig(vocab_size=320, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0),
}


@pytest.mark.parametrize("family", CAUSAL_BY_NAME)
@pytest.mark.parametrize("keep_logits", [True, False])
def test_models_that_are_causal_only_by_name_train_like_dense(family, keep_logits, caplog):
    model, batch = make(AutoModelForCausalLM, CAUSAL_BY_NAME[family]()), padded_batch(prompt=5)
    # Rows after the last label carry gradient too.
    batch["labels"][:, 9:] = IGNORE
    dense = loss_and_gradients(model, batch)
    with sparsify(model, keep_logits=keep_logits):
        for _ in range(2):
            assert_same(dense, loss_and_gradients(model, batch), tolerance=1e-10)
    assert sum("Active rows are detected in the backward pass" in record.message for record in caplog.records) == 1


def test_if_the_trial_of_causality_fails_rows_are_detected(caplog):
    model, batch = make_llama().double(), padded_batch(prompt=5)
    own = model.forward

    def refusing(input_ids, **inputs):
        if len(input_ids) == 2:
            raise ValueError("two sequences")
        return own(input_ids, **inputs)

    model.forward = refusing
    assert_same_training(model, batch)
    assert "a trial batch failed (ValueError)" in caplog.text


def test_row_losses_of_a_model_that_is_not_causal_are_refused():
    model, batch = make(AutoModelForCausalLM, XLMConfig(**XLM)), padded_batch()
    with sparsify(model) as sparsified, pytest.raises(SparsityError, match="XLMWithLMHeadModel is not causal"):
        sparsified.row_losses(batch["input_ids"], RowPlan.from_labels(batch["labels"]))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_norms_and_activations_skip_rows(family, monkeypatch):
    ran = []

    def recording(function, x, rows):
        ran.append(function.module)
        return sparse_rowwise(function, x, rows)

    monkeypatch.setattr("sebp_edge.engine.sparse.sparsify.sparse_rowwise", recording)
    model, batch = make_llama().double(), padded_batch()
    if family == "bert":
        head = AutoModelForSequenceClassification
        model, batch = make(head, ENCODERS["bert"]()), encoder_batch(head)
    with sparsify(model, keep_logits=True):
        model(**batch).loss.backward()  # verifies the rows
        assert not ran
        model(**batch).loss.backward()
    # Two norms and one activation in each of two layers, and one norm before or after them.
    assert len(ran) == 7 and sum("Norm" in type(module).__name__ for module in ran) == 5


@pytest.mark.slow
@pytest.mark.parametrize("router_loss", [True, False])
def test_experts_train_like_dense_and_keep_their_routers_loss(router_loss):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(**SIZES, head_dim=8, **experts, output_router_logits=router_loss, router_aux_loss_coef=0.5)
    model = make(AutoModelForCausalLM, config)
    model.set_experts_implementation("eager")
    assert_same_training(model, padded_batch(prompt=5))
    with sparsify(model):
        assert (model(**padded_batch()).logits is not None) == router_loss


def test_a_custom_loss_function_is_kept(caplog):
    model = make_llama().double()
    model.loss_function = lambda logits, labels, vocab_size, **others: logits.square().mean()
    assert_same_training(model, padded_batch())
    assert "the loss is not that of the next tokens" in caplog.text
    with sparsify(model):
        assert model(**padded_batch()).logits is not None


def test_a_custom_loss_of_the_next_tokens_is_kept_and_uses_the_labels_rows(caplog):
    model, own = make_llama().double(), make_llama().loss_function
    model.loss_function = lambda *inputs, **others: 2 * own(*inputs, **others)
    assert_same_training(model, padded_batch(prompt=5))
    caplog.clear()
    with sparsify(model):
        assert model(**padded_batch()).logits is not None
        model(**padded_batch())
    (record,) = caplog.records
    assert "its loss function is not" in record.message
