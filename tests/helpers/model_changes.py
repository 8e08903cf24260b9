"""Ways in which a model changes while it is trained, and the models that are changed."""

import copy
import functools
from collections import OrderedDict

import torch
import torch.nn.functional as F
from builders import checkpoint_activations, make_llama, seeded
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune

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
