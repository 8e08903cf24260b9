"""A model that changes between steps still trains like the dense one: no trial's result outlives what it was about."""

import copy
import functools
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from against_dense import assert_same, loss_and_gradients, padded_batch
from model_changes import CHANGES, LORA_CHANGES, dense_model, doubled, lora_model, replace_hooks, smoothed
from model_families import make_decoder
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.llama import modeling_llama

from sebp_edge import sparsify
from sebp_edge.research import Sparsified


def tripled(forward):
    def call(module, *args, **kwargs):
        output = forward(module, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output * 3
        output.loss = output.loss * 3
        return output

    return call


def train(model, change, steps=range(3)):
    """Loss and gradients of steps, before the second of which the model is changed."""
    found = []
    for step in steps:
        if step == 1:
            change(model)
        found.append(loss_and_gradients(model, padded_batch(lengths=(11, 4, 20 - step, 6), prompt=5)))
    return found


@functools.cache
def first_step(make):
    """The dense loss and gradients before any change."""
    return train(make(), None, range(1))[0]


def steps_and_dense(make, change):
    """Three steps, the last of which uses what the one after the change has verified; and what dense ones compute."""
    return range(3), [first_step(make), *train(make(), change, range(1, 3))]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_changed_between_steps_trains_like_dense(change, request):
    steps, dense = steps_and_dense(dense_model, change)
    model, name = dense_model(), request.node.callspec.id
    # What is about the head or the loss has to be seen by the fused loss, which keeps no logits; so is every other one.
    is_about_loss = any(word in name for word in ("head", "loss", "vocabulary"))
    keep_logits = not is_about_loss and list(CHANGES).index(name) % 2 == 0
    with sparsify(model, keep_logits=keep_logits):
        for expected, found in zip(dense, train(model, change, steps), strict=True):
            assert_same(expected, found, tolerance=1e-10 if keep_logits else 1e-5)


CLASSES = {
    "model": modeling_llama.LlamaForCausalLM,
    "MLP": modeling_llama.LlamaMLP,
    "norm": modeling_llama.LlamaRMSNorm,
    "linear layer": nn.Linear,
}


@pytest.mark.parametrize("changed", CLASSES.values(), ids=CLASSES)
def test_a_forward_replaced_in_a_class_between_steps_is_called(changed, monkeypatch):
    def change(_model):
        monkeypatch.setattr(changed, "forward", tripled(changed.forward))

    dense = train(dense_model(), change)
    monkeypatch.undo()
    model = dense_model()
    with sparsify(model):
        for expected, found in zip(dense, train(model, change), strict=True):
            assert_same(expected, found, tolerance=1e-5)


def test_a_loss_replaced_in_the_table_of_transformers_is_used(monkeypatch):
    def change(_model):
        monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", smoothed)

    dense = train(dense_model(), change)
    monkeypatch.undo()
    model = dense_model()
    with sparsify(model):
        for expected, found in zip(dense, train(model, change), strict=True):
            assert_same(expected, found, tolerance=1e-5)


def mean_loss(logits, labels, vocab_size, scale=1.0, **_):
    return scale * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("keywords", [{"num_items_in_batch": 9}, {"scale": 3.0}], ids=lambda given: next(iter(given)))
def test_a_loss_function_gets_the_keywords_of_the_call(keywords):
    expected, model = dense_model(), dense_model()
    expected.loss_function = model.loss_function = mean_loss
    batch = padded_batch() | keywords
    with sparsify(model):
        assert_same(loss_and_gradients(expected, batch), loss_and_gradients(model, batch), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda config: None, lambda config: setattr(config, "final_logit_softcapping", 0.3)]
)
def test_a_config_that_was_replaced_is_read(change):
    def replace(model):
        model.config = copy.deepcopy(model.config)

    def train_on(model):
        found = train(model, replace)
        change(model.config)
        return [*found, loss_and_gradients(model, padded_batch())]

    dense, model = train_on(make_decoder("gemma2")), make_decoder("gemma2")
    with sparsify(model):
        for expected, found in zip(dense, train_on(model), strict=True):
            assert_same(expected, found, tolerance=1e-5)


@pytest.mark.parametrize("keep_logits", [False, True], ids=["fused loss", "own loss"])
def test_rows_of_layers_that_are_trained_later_are_verified_then(keep_logits):
    def frozen_model():
        model = dense_model()
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        # Past tokens of other texts; labels determine the rows of no layer below.
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out + out.mean(dim=0))
        return model

    def change(model):
        model.requires_grad_(True)

    dense, model = train(frozen_model(), change), frozen_model()
    with sparsify(model, keep_logits=keep_logits):
        for expected, found in zip(dense, train(model, change), strict=True):
            assert_same(expected, found, tolerance=1e-10 if keep_logits else 1e-5)


@pytest.mark.slow
def test_a_model_evaluated_by_another_thread_computes_the_same():
    model, batch, done, seen = dense_model(), padded_batch(prompt=5), threading.Event(), []
    expected = model(batch["input_ids"]).logits.detach()

    def evaluate():
        while not (seen and done.is_set()):
            with torch.no_grad():
                seen.append(torch.allclose(model(batch["input_ids"]).logits, expected))

    with sparsify(model):
        loss_and_gradients(model, batch)
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for _ in range(8):
                loss_and_gradients(model, batch)
        finally:
            done.set()
            thread.join()
    assert all(seen)


@pytest.mark.parametrize("change", LORA_CHANGES.values(), ids=LORA_CHANGES)
def test_an_adapter_changed_between_steps_trains_like_dense(change):
    steps, dense = steps_and_dense(lora_model, change)
    model = lora_model()
    with sparsify(model):
        for expected, found in zip(dense, train(model, change, steps), strict=True):
            assert_same(expected, found, tolerance=1e-5)


@pytest.mark.parametrize(
    "name", ["adapter on the head", "hook on lora_A", "dropout", "merged", "DoRA", "modules to save", "unloaded"]
)
def test_an_adapter_changed_beforehand_trains_like_dense(name):
    change = LORA_CHANGES[name]
    expected, found = (lora_model() for _ in range(2))
    change(expected), change(found)
    with sparsify(found):
        assert_same(
            loss_and_gradients(expected, padded_batch()), loss_and_gradients(found, padded_batch()), tolerance=1e-5
        )


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "after a step") for name in ("head", "last block", "norm", "base model", "all modules")),
        ("head", "before"),
        ("all modules", "before"),
    ],
)
def test_hooks_see_what_they_see_in_the_dense_model(name, when):
    def outputs(model):
        modules = {"head": model.lm_head, "last block": model.model.layers[1], "norm": model.model.norm}
        modules |= {"base model": model.model, "all modules": None}
        seen = []

        def see(module, inputs, out):
            tensors = [one for one in (out if isinstance(out, tuple) else [out]) if isinstance(one, torch.Tensor)]
            seen.extend((type(module).__name__, one.detach()) for one in tensors)

        if when == "after a step":
            loss_and_gradients(model, padded_batch(prompt=5))
        hook = modules[name].register_forward_hook(see) if modules[name] else register_module_forward_hook(see)
        try:
            for _ in range(2):
                loss_and_gradients(model, padded_batch(prompt=5))
        finally:
            hook.remove()
        return seen

    expected, model = outputs(dense_model()), dense_model()
    with sparsify(model):
        found = outputs(model)
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    for (_, one), (_, other) in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_layers_stacked_in_inference_mode_can_be_trained():
    expected, model = lora_model(), lora_model().float()
    with sparsify(model):
        model.double()  # moves the weights, so that they are stacked anew
        expected.load_state_dict(model.state_dict())
        with torch.inference_mode():
            model.eval()(padded_batch()["input_ids"])
        model.train()
        found = loss_and_gradients(model, padded_batch())
    assert_same(loss_and_gradients(expected, padded_batch()), found, tolerance=1e-5)


@pytest.mark.parametrize("make", [dense_model, lora_model], ids=["full", "lora"])
@pytest.mark.parametrize("how", ["saved", "copied"])
def test_a_copy_of_a_sparsified_model_is_a_plain_model(make, how):
    model = make()
    with sparsify(model):
        found = loss_and_gradients(model, padded_batch())
        if how == "copied":
            other = copy.deepcopy(model)
        else:
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            other = torch.load(file, weights_only=False)
    assert_same(loss_and_gradients(other, padded_batch()), found, tolerance=1e-5)
    assert other(**padded_batch()).logits is not None
    with sparsify(other):
        assert_same(loss_and_gradients(other, padded_batch()), found, tolerance=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "phi3"])
def test_a_changed_model_is_tried_once(family, monkeypatch):
    num_trials, examine = 0, Sparsified._examine

    def counted(handle):
        nonlocal num_trials
        num_trials += 1
        return examine(handle)

    model = make_decoder(family)
    with sparsify(model):
        loss_and_gradients(model, padded_batch())
        monkeypatch.setattr(Sparsified, "_examine", counted)
        replace_hooks(model.get_input_embeddings(), doubled)
        for _ in range(3):
            loss_and_gradients(model, padded_batch())
    assert num_trials == 1
