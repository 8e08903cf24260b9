"""Models whose rows mix outside of attention: gradients are the dense ones, or the model is refused, and stay so when a
gate opens that was zero while the model was tried."""

import pytest
import torch
import torch.nn.functional as F
from against_dense import (
    assert_same,
    loss_and_gradients,
    padded_batch,
)
from builders import IGNORE, SIZES, make_llama, seeded
from pairwise import pairwise
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BartConfig, LlamaForCausalLM, PegasusConfig, __version__
from transformers.modeling_outputs import CausalLMOutputWithPast

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError
from sebp_edge.research import Hoisted

SIZE = SIZES["hidden_size"]


def shift(x):
    return F.pad(x, (0, 0, 1, -1))


class Decay(nn.Module):
    """A state that each row adds to, as in recurrent models."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        states = [x[:, 0]]
        for row in x[:, 1:].unbind(1):
            states.append(self.decay.sigmoid() * states[-1] + row)
        return torch.stack(states, dim=1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(SIZE, 1, 3) / 3)

    def forward(self, x):
        return F.conv1d(F.pad(x, (0, 0, 2, 0)).transpose(1, 2), self.kernel, groups=SIZE).transpose(1, 2)


class Transposed(nn.Module):
    """One of torch's modules along the sequence."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


MIXERS = {
    "shift": lambda: Function(shift),
    "roll": lambda: Function(lambda x: x.roll(1, dims=1)),
    "backward roll": lambda: Function(lambda x: x.roll(-1, dims=1)),
    "sum of earlier rows": lambda: Function(lambda x: x.cumsum(1)),
    "mean over time": lambda: Function(lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "mean over the batch": lambda: Function(lambda x: x.mean(0, keepdim=True).expand_as(x)),
    "norm over time": lambda: Function(lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)),
    "kernel": Convolution,
    "state": Decay,
    "convolution": lambda: Transposed(nn.Conv1d(SIZE, SIZE, 3, padding=2)),
    "pooling": lambda: Transposed(nn.AvgPool1d(3, stride=1, padding=1)),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(SIZE)),
    "recurrence": lambda: nn.GRU(SIZE, SIZE, batch_first=True),
}


class Mixed(nn.Module):
    """What a layer computes, and a share of it that a function mixes; the share is zero or tiny at first."""

    def __init__(self, inner, mixer, gate, where):
        super().__init__()
        self.inner, self.mixer, self.where = inner, mixer, where
        self.gate = nn.Parameter(torch.tensor(float(gate)))

    def mix(self, x):
        mixed = self.mixer(x)
        return x + self.gate * (mixed[0] if isinstance(mixed, tuple) else mixed)

    def forward(self, x):
        return self.inner(self.mix(x)) if self.where == "input" else self.mix(self.inner(x))


class Ratio(Mixed):
    """Mixes each row with another by a ratio that begins at 1, as token shifts do."""

    def mix(self, x):
        return x.lerp(self.mixer(x), 1 - self.gate)


def lora_beside_the_gate(model):
    """LoRA with B = 0, as it begins, in a model whose other weights are frozen but for the gate."""
    dtype = model.dtype
    model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"), autocast_adapter_dtype=False).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("gate"))
    return model.train()


def mixed_llama(mixer, gate, place, where, block=-1, kind=Mixed):
    model = make_llama()
    layer = model.model.layers[block]
    parent, name = {"mlp": (layer, "mlp"), "o_proj": (layer.self_attn, "o_proj"), "norm": (model.model, "norm")}[place]
    with seeded(1):
        setattr(parent, name, kind(getattr(parent, name), mixer(), gate, where))
    return model.train()


def batch_with_gaps():
    batch = padded_batch(lengths=(11, 8, 20, 16), prompt=5)
    batch["labels"][:, 9:12] = IGNORE
    return batch


def assert_dense_while_the_gate_opens(model, tolerance, **options):
    """Twice with the gate as it is, once to detect rows and once with predicted ones, and once with an open gate."""
    gate = next(parameter for name, parameter in model.named_parameters() if name.endswith("gate"))
    batch, first = batch_with_gaps(), float(gate.detach())

    def passes():
        for value in (first, first, first + 0.5):
            with torch.no_grad():
                gate.fill_(value)
            yield loss_and_gradients(model, batch)

    dense = list(passes())
    with sparsify(model, **options):
        for expected, found in zip(dense, passes(), strict=True):
            assert_same(expected, found, tolerance)


# The loss without logits is in fp32.
@pairwise(
    mixer=MIXERS,
    gate=[0.0, 1e-6, 1.0],
    place=["mlp", "o_proj", "norm"],
    where=["input", "output"],
    block=[-1, 0],
    keep_logits=[False, True],
    dtype=[torch.float64, torch.float32],
    adapt={"full": lambda model: model, "lora": lora_beside_the_gate},
)
def test_gradients_stay_dense_when_a_gate_opens(mixer, gate, place, where, block, keep_logits, dtype, adapt):
    model = adapt(mixed_llama(mixer, gate, place, where, block).to(dtype))
    assert_dense_while_the_gate_opens(model, 1e-4 if dtype == torch.float64 else 2e-3, keep_logits=keep_logits)


@pytest.mark.parametrize("mixer", ["shift", "backward roll", "state"])
def test_a_ratio_that_begins_at_one_hides_nothing(mixer):
    model = mixed_llama(MIXERS[mixer], 1.0, "mlp", "output", kind=Ratio).double()
    model.model.layers[-1].mlp.gate.requires_grad_(False)
    assert_dense_while_the_gate_opens(model, 1e-4)


# The mean over a batch of one row is that row.
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "mean over the batch"])
def test_a_hoisted_model_whose_sequences_would_read_each_other_is_refused(mixer):
    with pytest.raises(SparsityError):
        Hoisted(mixed_llama(MIXERS[mixer], 0.0, "mlp", "output").eval())


class ShiftingForCausalLM(LlamaForCausalLM):
    """Mixes rows between the base model and the head, by a gate of zero."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.tensor(0.0))

    def forward(self, input_ids, labels=None, **others):
        hidden = self.model(input_ids, attention_mask=others.get("attention_mask")).last_hidden_state
        logits = self.lm_head(hidden + self.gate * shift(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class CappedForCausalLM(LlamaForCausalLM):
    """Caps its logits, which changes nothing while they are small."""

    def forward(self, input_ids, labels=None, **others):
        hidden = self.model(input_ids, attention_mask=others.get("attention_mask")).last_hidden_state
        logits = 10 * (self.lm_head(hidden) / 10).tanh()
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_gate_between_base_model_and_head_keeps_the_models_own_loss():
    assert_dense_while_the_gate_opens(ShiftingForCausalLM(make_llama().config).double().train(), 1e-4)


def test_a_cap_that_small_logits_do_not_reach_keeps_the_models_own_loss():
    model, batch = CappedForCausalLM(make_llama().config).double().train(), batch_with_gaps()
    with sparsify(model):
        loss_and_gradients(model, batch)
        with torch.no_grad():
            model.lm_head.weight.mul_(100)
        found = loss_and_gradients(model, batch)
    assert_same(loss_and_gradients(model, batch), found, 1e-4)


@pytest.fixture
def taken_for_exact(monkeypatch):
    """Restricts last layers without a trial, in blocks whose layers are unknown: all compute the rows of keys."""
    monkeypatch.setattr("sebp_edge.engine.sparse.patches.last_layer.LastLayer.is_exact", lambda *_: True)
    monkeypatch.setattr("sebp_edge.engine.sparse.sparsify.layers_after_attention", lambda model: set())


@pytest.mark.usefixtures("taken_for_exact")
def test_the_first_pass_compares_what_the_last_layer_would_leave_out():
    model, batch = mixed_llama(MIXERS["shift"], 1.0, "mlp", "input").double(), batch_with_gaps()
    dense = loss_and_gradients(model, batch)
    with sparsify(model) as sparsified:
        for _ in range(3):
            assert_same(dense, loss_and_gradients(model, batch), 1e-4)
        assert sparsified._findings.verification.has_failed


@pytest.mark.usefixtures("taken_for_exact", "verified_rows")
def test_verifying_every_pass_finds_a_last_layer_that_mixes_rows():
    model, batch = mixed_llama(MIXERS["shift"], 0.0, "mlp", "input").double(), batch_with_gaps()
    with sparsify(model):
        loss_and_gradients(model, batch)
        loss_and_gradients(model, batch)
        with torch.no_grad():
            model.model.layers[-1].mlp.gate.fill_(0.5)
        with pytest.raises(RuntimeError, match="skipped rows have a gradient"):
            loss_and_gradients(model, batch)


@pytest.mark.slow
@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason=f"transformers {__version__} has no inkling2_text")
def test_short_convolutions_after_the_last_layer_train_like_dense():
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "pad_token_id": 0}
    config = CONFIG_MAPPING["inkling2_text"](
        **sizes,
        moe_intermediate_size=32,
        unpadded_vocab_size=320,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window_size=16,
    )
    with seeded(1):
        model = AutoModelForCausalLM.from_config(config).float().train()
    batch = batch_with_gaps()
    dense = loss_and_gradients(model, batch)
    with sparsify(model):
        for _ in range(3):
            assert_same(dense, loss_and_gradients(model, batch), 1e-3)


@pytest.mark.parametrize("family", [BartConfig, PegasusConfig])
def test_decoders_that_count_their_own_positions_are_refused(family):
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32}
    config = family(vocab_size=320, max_position_embeddings=128, is_decoder=True, is_encoder_decoder=False, **sizes)
    with pytest.raises(SparsityError):
        Hoisted(AutoModelForCausalLM.from_config(config).eval())
