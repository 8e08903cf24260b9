"""A model that changes between steps still trains like the dense one: no trial's result outlives what it was about."""

import copy
import functools
import io
import threading
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from against_dense import assert_same, assert_same_gradients, gradients, loss_and_gradients, padded_batch
from builders import batch_losses, checkpoint_activations, make_llama, row_losses, seeded
from model_families import DECODERS, make_decoder
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.llama import modeling_llama

from sebp_edge import sparsify
from sebp_edge.engine.sparse import hoist_if_exact as hoisting
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.state import ModelState, describe
from sebp_edge.errors import SparsityError
from sebp_edge.research import RowPlan, Sparsified

VOCABULARY, HIDDEN = 320, 32
TARGETS = ["q_proj", "o_proj", "down_proj"]


def dense_model():
    return make_llama(tie_word_embeddings=False, use_cache=False).double().train()


def lora_model():
    return copy.deepcopy(_lora_model())


@functools.cache
def _lora_model():
    config = LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    with seeded(3):
        return get_peft_model(dense_model(), config).double().train()


def smoothed(logits, labels, vocab_size, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.01)


def doubled(_module, _inputs, output):
    return output * 2 if isinstance(output, torch.Tensor) else output


def add_adapter(model, *targets, **options):
    config = LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False, **options)
    with seeded(4):
        model.add_adapter("other", config)
    model.set_adapter("other")
    model.double()


def layer_of(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj


def resize_vocabulary(model):
    with seeded(5):
        model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    model.double()


def new_head(model):
    with seeded(5):
        model.set_output_embeddings(nn.Linear(HIDDEN, VOCABULARY, bias=False).double())


def append_block(model):
    block = copy.deepcopy(model.model.layers[0])
    for part in block.modules():
        vars(part).pop("forward", None)
    model.model.layers.append(block)
    model.config.num_hidden_layers += 1


def drop_block(model):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def swap_blocks(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def see_all_tokens(model):
    for block in model.model.layers:
        block.self_attn.is_causal = False
    model.config.is_causal = False


def window(model):
    model.config.sliding_window = 3
    for block in model.model.layers:
        block.self_attn.sliding_window = 3


def mix_all_rows(_module, _inputs, output):
    return output + output.mean(dim=(0, 1))


def mix_rows(model):
    """Every row's gradient reaches all others from here on."""
    model.model.layers[0].mlp.register_forward_hook(mix_all_rows)


def mix_rows_backward(model):
    model.model.layers[1].register_full_backward_hook(
        lambda module, given, grads: tuple(
            None if one is None else one + one.mean(dim=1, keepdim=True) for one in given
        )
    )


def replace_forward(model):
    mlp = model.model.layers[1].mlp
    forward = type(mlp).forward
    mlp.forward = lambda x: forward(mlp, x) + x.mean(dim=1, keepdim=True)


def replace_hooks(module, hook):
    """Clears a module's hooks as people do, and registers another."""
    module._forward_hooks = OrderedDict()
    module.register_forward_hook(hook)


def spectral_norm(model, module):
    with seeded(6):
        parametrizations.spectral_norm(module)
    model.double()


def two_layer_head(model):
    with seeded(5):
        model.lm_head = nn.Sequential(nn.Linear(HIDDEN, 8), nn.Linear(8, VOCABULARY)).double()


def generate(model):
    with torch.inference_mode():
        model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    model.train()


def tripled(forward):
    def call(module, *args, **kwargs):
        output = forward(module, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output * 3
        output.loss = output.loss * 3
        return output

    return call


CHANGES = {
    "nothing": lambda model: None,
    "head replaced": new_head,
    "head with a bias": lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.ones(VOCABULARY).double())),
    "hook on the head": lambda model: model.lm_head.register_forward_hook(doubled),
    "pre-hook on the head": lambda model: model.lm_head.register_forward_pre_hook(lambda head, x: (x[0] * 2,)),
    "backward hook on the head": lambda model: model.lm_head.register_full_backward_hook(
        lambda head, given, grads: (given[0] * 2,)
    ),
    "parametrized head": lambda model: nn.utils.parametrizations.weight_norm(model.lm_head),
    "head's forward replaced": lambda model: setattr(
        model.lm_head, "forward", lambda x: F.linear(x, model.lm_head.weight * 2)
    ),
    "vocabulary resized": resize_vocabulary,
    "loss function": lambda model: setattr(model, "loss_function", smoothed),
    "scaled logits in the hidden states": lambda model: model.model.norm.register_forward_hook(doubled),
    "hook on the last query": lambda model: model.model.layers[1].self_attn.q_proj.register_forward_hook(doubled),
    "block appended": append_block,
    "block removed": drop_block,
    "blocks swapped": swap_blocks,
    "hook that mixes rows": mix_rows,
    "backward hook that mixes rows": mix_rows_backward,
    "forward that mixes rows": replace_forward,
    "attention sees all tokens": see_all_tokens,
    "sliding window": window,
    "eps": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "frozen": lambda model: model.model.layers[0].requires_grad_(False),
    "scale of attention": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "table of hooks replaced": lambda model: replace_hooks(model.model.layers[0].mlp, mix_all_rows),
    "table of the head's hooks replaced": lambda model: replace_hooks(model.lm_head, doubled),
    "pruned": lambda model: prune.l1_unstructured(model.model.layers[1].mlp.up_proj, "weight", 0.5),
    "pruned head": lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.5),
    "spectral norm": lambda model: spectral_norm(model, model.model.layers[1].mlp.up_proj),
    "spectral norm of the head": lambda model: spectral_norm(model, model.lm_head),
    "spectral norm of the embedding": lambda model: spectral_norm(model, model.model.embed_tokens),
    "two-layer head": two_layer_head,
    "tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "hook on the weight": lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient * 2),
    "hook on the model": lambda model: model.register_forward_hook(
        lambda module, inputs, out: type(out)(loss=out.loss + out.logits.mean())
    ),
    "generated": generate,
    "gradient checkpointing": lambda model: checkpoint_activations(model, False),
    "reentrant checkpointing": lambda model: checkpoint_activations(model, True),
    "rounded": lambda model: model.half().double(),
}


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


LORA_CHANGES = {
    "adapter on the head": lambda model: add_adapter(model, "q_proj", "lm_head"),
    "other adapter": lambda model: add_adapter(model, "q_proj", "v_proj"),
    "hook on lora_A": lambda model: layer_of(model).lora_A["default"].register_forward_hook(doubled),
    "backward hook on lora_B": lambda model: (
        layer_of(model).lora_B["default"].register_full_backward_hook(lambda part, given, grads: (given[0] * 2,))
    ),
    "hook on the base layer": lambda model: layer_of(model).base_layer.register_forward_hook(doubled),
    "base layer's forward replaced": lambda model: setattr(layer_of(model).base_layer, "forward", lambda x: 0 * x),
    "hook on the layer": lambda model: layer_of(model).register_forward_hook(doubled),
    "dropout": lambda model: layer_of(model).lora_dropout.update({"default": nn.Dropout(1.0)}),
    "scaling": lambda model: layer_of(model).scaling.update(default=3.0),
    "disabled": lambda model: layer_of(model).enable_adapters(False),
    "merged": lambda model: layer_of(model).merge(),
    "DoRA": lambda model: add_adapter(model, "q_proj", "v_proj", use_dora=True),
    "rsLoRA": lambda model: add_adapter(model, "q_proj", "v_proj", use_rslora=True),
    "modules to save": lambda model: add_adapter(model, "q_proj", modules_to_save=["lm_head", "embed_tokens"]),
    "adapter deleted": lambda model: (add_adapter(model, "q_proj"), model.delete_adapter("default")),
    "unloaded": lambda model: model.unload().requires_grad_(True),
    "everything trained": lambda model: model.requires_grad_(True),
    "pruned lora_B": lambda model: prune.l1_unstructured(layer_of(model).lora_B["default"], "weight", 0.5),
    "weights replaced": lambda model: model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    ),
}


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


HOISTED_CHANGES = {
    name: CHANGES[name]
    for name in (
        *("nothing", "head replaced", "vocabulary resized", "scaled logits in the hidden states"),
        *("hook on the last query", "block appended", "block removed", "blocks swapped", "sliding window", "eps"),
        *("activation", "frozen", "scale of attention"),
    )
}


def assert_follows(make, change):
    """Checks that the gradients of a hoisted model are the dense ones after the model has changed."""
    batch, expected, model = padded_batch(prompt=5), make(), make()
    with Hoisted(model) as hoisted:
        gradients(model, batch_losses(hoisted, batch))
        change(expected), change(model)
        found = gradients(model, batch_losses(hoisted, batch))
    _, dense = loss_and_gradients(expected, batch)
    assert_same_gradients(dense, found, 1e-5, 1e-15)


@pytest.mark.parametrize("change", HOISTED_CHANGES.values(), ids=HOISTED_CHANGES)
def test_a_hoisted_model_changed_between_steps_trains_like_dense(change):
    assert_follows(dense_model, change)


def test_a_head_untied_between_hoisted_steps_gets_its_own_gradient():
    def tied_model():
        return make_llama(use_cache=False).double().train()

    def untie(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)

    assert_follows(tied_model, untie)


@pytest.mark.parametrize("name", ["hook that mixes rows", "forward that mixes rows", "table of hooks replaced"])
def test_a_model_that_is_exact_no_longer_is_hoisted_no_longer(name):
    batch, model = padded_batch(), dense_model()
    hoisted, _ = hoist_if_exact(model, [[5, 6, 7, 8, 9, 10], [8, 9, 10]], 2)
    with hoisted:
        batch_losses(hoisted, batch)
        CHANGES[name](model)
        with pytest.raises(SparsityError, match=r"has changed .* (differ from the padded ones|read each other)"):
            batch_losses(hoisted, batch)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_trial_was_interrupted_after_a_change_is_tried_again_by_the_next_batch():
    batch, model, expected = padded_batch(), dense_model(), dense_model()
    plan, interruptions = RowPlan.from_labels(batch["labels"]), [KeyboardInterrupt]

    def interrupt_once(module, inputs, output):
        if interruptions:
            raise interruptions.pop()

    hoisted, _ = hoist_if_exact(model, [[5, 6, 7, 8, 9, 10], [8, 9, 10]], 2)
    with hoisted:
        model.model.layers[0].register_forward_hook(interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            row_losses(hoisted, batch["input_ids"], plan)
        found = gradients(model, row_losses(hoisted, batch["input_ids"], plan))
    _, dense = loss_and_gradients(expected, batch)
    assert_same_gradients(dense, found, 1e-5, 1e-15)
    assert model.config._attn_implementation == "sdpa"


# Of these, the code of the model is the same afterwards.
VALUES_ONLY = {
    *("nothing", "head replaced", "blocks swapped", "generated", "hook on the weight", "rounded", "weights replaced")
}


@pytest.mark.parametrize("name", sorted((CHANGES | LORA_CHANGES).keys() - VALUES_ONLY))
def test_a_model_that_has_passed_is_tried_again_if_anything_but_values_has_changed(name):
    model = lora_model() if name in LORA_CHANGES else dense_model()
    before = describe(model, model)
    assert before is not None and before == describe(model, model)
    (CHANGES | LORA_CHANGES)[name](model)
    assert describe(model, model) != before


@pytest.mark.slow
def test_a_copy_of_a_model_that_has_passed_is_not_tried_again_until_it_differs(monkeypatch):
    trials, lines = [], [[5, 6, 7, 8, 9, 10], [8, 9, 10]]
    padded = hoisting.padded_losses
    monkeypatch.setattr(hoisting, "padded_losses", lambda *given: trials.append(given) or padded(*given))

    def hoist(model, **options):
        hoisted, reason = hoist_if_exact(model, lines, 2, **options)
        with hoisted:
            assert reason is None
            batch = padded_batch(prompt=5)
            batch_losses(hoisted, batch)
        return len(trials)

    model = lora_model()
    other = copy.deepcopy(model, {id(each): each for each in model.parameters() if not each.requires_grad})
    assert [hoist(each) for each in (model, model, other, model)] == [1, 1, 1, 1]
    assert [hoist(model, checkpoints=1), hoist(model, checkpoints=1), hoist(model)] == [2, 2, 2]
    layer_of(other).scaling.update(default=3.0)
    assert [hoist(other), hoist(other), hoist(model)] == [3, 3, 3]
    with torch.autocast("cpu", torch.bfloat16):
        assert hoist(model) == 4
    assert hoist(lora_model()) == 5  # other weights
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **options: rotate(*given, **options))
    assert [hoist(model), hoist(model)] == [6, 6]
    for each in (*model.parameters(), *other.parameters()):
        each.data.mul_(1.01)
    model.base_model.model.model.layers[1].mlp.register_forward_hook(mix_all_rows)
    assert hoist_if_exact(model, lines, 2)[0] is None


@pytest.mark.parametrize("name", ["head with a bias", "hook on the head", "head's forward replaced"])
def test_a_hoisted_model_refuses_a_head_that_it_would_not_call(name):
    batch, model = padded_batch(), dense_model()
    with Hoisted(model) as hoisted:
        batch_losses(hoisted, batch)
        CHANGES[name](model)
        with pytest.raises(SparsityError, match="head"):
            batch_losses(hoisted, batch)


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


@pytest.mark.parametrize("family", DECODERS)
def test_training_a_model_does_not_look_like_a_change(family):
    model = make_decoder(family)
    batch = padded_batch()
    model(**batch, use_cache=False).loss.backward()
    state = ModelState(model, model)
    for _ in range(2):
        model(**batch, use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(**batch)
    assert state.find_change() is None


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
