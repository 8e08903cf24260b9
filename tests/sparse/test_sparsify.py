"""The drop-in: dense losses and gradients for every kind of padding, and a model that is restored."""

import pytest
import torch
from against_dense import assert_same_training, loss_and_gradients, padded_batch
from builders import IGNORE, make_llama
from peft import LoraConfig, get_peft_model

from sebp_edge import sparsify
from sebp_edge.errors import MachineError, OptionError, SparsityError


@pytest.mark.parametrize(
    "batch",
    [
        padded_batch(lengths=(24, 24)),
        padded_batch(lengths=(1, 1)) | {"labels": torch.full((2, 24), 5)},
        padded_batch() | {"attention_mask": None},
    ],
    ids=["nothing padded", "loss on padding", "no mask"],
)
def test_unusual_batches_train_like_dense(batch):
    assert_same_training(make_llama().double(), batch)


def test_untied_heads_biases_and_eager_attention_train_like_dense():
    options = {"tie_word_embeddings": False, "attention_bias": True, "attn_implementation": "eager"}
    assert_same_training(make_llama(**options).double(), padded_batch())


@pytest.mark.slow
def test_biases_trained_with_an_adapter_train_like_dense():
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, bias="all")
    model = get_peft_model(make_llama(attention_bias=True), config).double()
    assert any(p.requires_grad for name, p in model.named_parameters() if name.endswith("q_proj.base_layer.bias"))
    assert_same_training(model, padded_batch())


def test_a_loss_computed_outside_of_the_model_trains_like_dense():
    model, batch = make_llama().double(), padded_batch()
    labels = batch.pop("labels")

    def gradients():
        model.zero_grad()
        logits = model(**batch).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        return [p.grad.clone() for p in model.parameters()]

    dense = gradients()
    with sparsify(model):
        sparse = gradients()
    for one, other in zip(dense, sparse, strict=True):
        assert (one - other).norm() <= 1e-10 * one.norm()


def test_verification_finds_skipped_rows_with_a_gradient(verified_rows):
    model, batch = make_llama(), padded_batch()
    with sparsify(model, keep_logits=True):
        model(**batch).loss.backward()
        out = model(**batch)
        with pytest.raises(RuntimeError, match=r"\d+ of \d+ skipped rows have a gradient"):
            # The additional loss reads rows without labels too.
            (out.loss + out.logits.square().mean()).backward()


def test_the_last_block_computes_only_loss_rows_except_for_keys_and_values():
    model, batch = make_llama(), padded_batch(prompt=5)
    seen = {}

    def count_rows(name, layer):
        def count(dout):
            seen[name] = int(dout.ne(0).any(-1).sum())

        def hook(module, args, out):
            out.register_hook(count)

        layer.register_forward_hook(hook)

    with sparsify(model, keep_logits=True) as sparsified:
        for name, layer in sparsified.layers.items():
            count_rows(name.removeprefix("model.layers."), layer)
        model(**batch).loss.backward()
        on_loss_rows = sparsified._findings.after_attention & set(sparsified.layers.values())
    names = {name.removeprefix("model.layers.") for name, layer in sparsified_layers(model) if layer in on_loss_rows}
    assert names == {"1.self_attn.q_proj", "1.self_attn.o_proj", "lm_head"} | {
        f"1.mlp.{part}_proj" for part in ("gate", "up", "down")
    }
    loss_rows = int((batch["labels"][:, 1:] != IGNORE).sum())
    assert {seen[name] for name in names} == {loss_rows}
    assert seen["1.self_attn.v_proj"] > loss_rows


def sparsified_layers(model):
    return [(name, layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear]


def test_two_models_do_not_share_state():
    one, other = make_llama().double(), make_llama(hidden_size=64).double()
    with sparsify(one):
        _, expected = loss_and_gradients(one, padded_batch())
    with sparsify(one), sparsify(other):
        loss = one(**padded_batch()).loss
        other(**padded_batch(lengths=(3, 9))).loss.backward()
        one.zero_grad()
        loss.backward()
    for name, parameter in one.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-10), name


def test_sparsifying_twice_is_refused():
    model = make_llama()
    with sparsify(model), pytest.raises(SparsityError, match="once"):
        sparsify(model)
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("given", [None, "gpt2", type(make_llama()), [make_llama()]])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(OptionError, match=f"A {type(given).__name__} cannot be sparsified; expected a model"):
        sparsify(given)


@pytest.mark.parametrize(("num_rows", "num_active"), [(4, 5), (4, 0), (4, -1)])
def test_measuring_impossible_numbers_of_rows_is_refused(num_rows, num_active):
    with (
        sparsify(make_llama()) as sparsified,
        pytest.raises(OptionError, match=f"num_active is {num_active}; expected 1"),
    ):
        sparsified.measure(num_rows, num_active)


def test_measuring_needs_our_kernels():
    with (
        sparsify(make_llama()) as sparsified,
        pytest.raises(MachineError, match="Measuring needs an NVIDIA GPU and working Triton; the model is on cpu"),
    ):
        sparsified.measure(8, 4)
