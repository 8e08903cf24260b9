"""Layers run whole on packed texts if operations compute all that mixes their rows; all others stay as they are."""

import copy
import functools

import pytest
import torch
from against_dense import dense_losses, gradients, padded_batch
from builders import SIZES, gpu_sync_forbidden, hoist
from model_families import make_model
from torch import nn
from transformers import Lfm2Config, Qwen3_5TextConfig

from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.agreement import graph_cut_after
from sebp_edge.engine.sparse.patches.packed_layers import PackedTexts, packed_forward, runs_packed
from sebp_edge.engine.training.captured_gradients import CapturedGradients
from sebp_edge.errors import SparsityError
from sebp_edge.research import ActiveTokens, RowPlan

# Of several chunks, of one row, shorter than a convolution's kernel, of exactly one chunk.
LENGTHS = (150, 1, 2, 64, 70)


def pack(lengths, device="cpu"):
    batch = padded_batch(lengths, max(lengths) + 1)
    return ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"])).to(device)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **options):
    raise AssertionError("not on packed texts")


def torch_chunk_gated_delta_rule(query, key, value, **options):
    raise AssertionError("not on packed texts")


def scan(x):
    return x.cumsum(1)


class Layer(nn.Module):
    """Calls what transformers' layers do, with these options."""

    def __init__(self, **options):
        super().__init__()
        self.conv, self.options = nn.Conv1d(3, 3, 2, groups=3), options

    def forward(self, hidden_1AD):
        weight = self.conv.weight.squeeze(1)
        return causal_conv1d_fn(hidden_1AD.transpose(1, 2), weight, self.conv.bias, **self.options).transpose(1, 2)


class LinearAttention(Layer):
    def forward(self, q):
        causal_conv1d_fn(q.flatten(2).transpose(1, 2), self.conv.weight.squeeze(1))
        numbers = q[..., 0].sigmoid()
        return torch_chunk_gated_delta_rule(q, q, q, g=-numbers, beta=numbers, **self.options)[0]


class Scan(Layer):
    def forward(self, hidden_1AD):
        return scan(super().forward(hidden_1AD)) + causal_conv1d_fn(hidden_1AD, self.conv.weight)


def texts():
    return PackedTexts(torch.tensor([0, 3, 3, 5]).int(), 5)


def test_each_row_knows_how_far_its_text_has_come():
    assert texts().positions_A.tolist() == [0, 1, 2, 0, 1]


def test_a_layer_that_mixes_rows_otherwise_or_was_changed_is_not_packed():
    assert runs_packed(Layer())
    assert not runs_packed(Scan())
    assert runs_packed(LinearAttention())
    wrapped, offloaded = Layer(), Layer()
    wrapped.forward = functools.wraps(wrapped.forward)(lambda x, forward=wrapped.forward: 2 * forward(x))
    offloaded.conv._hf_hook = object()
    assert not runs_packed(wrapped)
    assert not runs_packed(offloaded)

    class Doubled(Layer):
        forward = functools.wraps(Layer.forward)(lambda layer, x: 2 * Layer.forward(layer, x))

    assert not runs_packed(Doubled())


@pytest.mark.parametrize(
    ("options", "named"),
    [({"activation": "gelu"}, "gelu"), ({"seq_idx": torch.zeros(5)}, "seq_idx"), ({"initial_states": 1}, "initial_")],
)
def test_options_of_a_convolution_that_would_change_its_result_are_refused(options, named):
    with pytest.raises(SparsityError, match=named):
        packed_forward(Layer(**options), texts)(torch.randn(1, 5, 3))
    packed_forward(Layer(activation="swish", use_cache=False), texts)(torch.randn(1, 5, 3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "not normalised"),
        ({"use_qk_l2norm_in_kernel": True, "initial_state": torch.zeros(1)}, "initial_state"),
        ({"use_qk_l2norm_in_kernel": True, "output_final_state": True}, "final states"),
        ({"use_qk_l2norm_in_kernel": True, "scale": 2.0}, "scale"),
    ],
)
def test_options_of_linear_attention_that_would_change_its_result_are_refused(options, named):
    with pytest.raises(SparsityError, match=named):
        packed_forward(LinearAttention(**options), texts)(torch.randn(1, 5, 1, 3))
    options = {"use_qk_l2norm_in_kernel": True, "initial_state": None, "output_final_state": False}
    assert packed_forward(LinearAttention(**options), texts)(torch.randn(1, 5, 1, 3)).shape == (1, 5, 1, 3)


def test_a_layer_with_a_users_forward_is_refused():
    model = make_model(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))
    layer = model.model.layers[0].conv
    own = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    with pytest.raises(SparsityError, match="Its Conv1d would mix neighbouring sequences"):
        hoist(model)


def test_a_forward_that_is_replaced_later_is_refused_until_it_is_put_back():
    model, tokens = make_model(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])), pack((5, 9))
    with torch.no_grad(), hoist(model) as hoisted:
        before, layer = hoisted.row_losses(tokens), model.model.layers[0].conv
        own = layer.forward
        layer.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
        with pytest.raises(SparsityError, match="cannot be hoisted any more: Its Conv1d would mix"):
            hoisted.row_losses(tokens)
        del layer.forward
        assert torch.equal(hoisted.row_losses(tokens), before)


def make_on_gpu():
    """A Qwen3.5 with heads of the published size."""
    sizes = SIZES | {"hidden_size": 256, "num_hidden_layers": 3}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128}
    layers = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_value_head_dim": 128}
    return make_model(Qwen3_5TextConfig(**sizes, head_dim=64, **heads, **layers)).to("cuda", torch.bfloat16)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("options", [{}, {"checkpoints": 2}], ids=["plain", "checkpoints"])
    @pytest.mark.parametrize("lengths", [LENGTHS, (33,), (2, 1), (300, 7, 129, 5)])
    def test_gradients_err_no_more_than_those_of_the_dense_model(self, lengths, options):
        model = make_on_gpu()
        batch = {name: each.cuda() for name, each in padded_batch(lengths, max(lengths) + 1).items()}
        exact_model = copy.deepcopy(model).double()
        exact = gradients(exact_model, dense_losses(exact_model, batch))
        dense = gradients(model, dense_losses(model, batch))
        with hoist(model, **options) as hoisted:
            assert len(hoisted._restarts.layers) == 2
            found = gradients(model, hoisted.row_losses(pack(lengths, "cuda")))
        largest = max(gradient.norm() for gradient in exact.values())
        for name, truth in exact.items():
            allowed = 2 * (dense[name] - truth).norm() + 1e-2 * truth.norm() + 1e-4 * largest
            assert (found[name] - truth).norm() <= allowed, name

    @pytest.mark.parametrize("changed", range(len(LENGTHS)))
    def test_no_bit_of_a_text_depends_on_another(self, changed):
        model, tokens, results = make_on_gpu(), pack(LENGTHS, "cuda"), []
        # The last token of a text is in no row.
        of_changed = slice(*tokens.cu_seqlens[changed : changed + 2].tolist())
        with hoist(model) as hoisted:
            for _ in range(2):
                with graph_cut_after(model.get_input_embeddings()) as embedded:
                    losses = hoisted.row_losses(tokens)
                others = losses[tokens.sequences != changed]
                (gradient,) = torch.autograd.grad(others.sum(), embedded)
                results.append((others, gradient.squeeze(0)))
                tokens.input_ids[of_changed] = 5
        (before, gradient_before), (after, gradient_after) = results
        assert torch.equal(before, after)
        assert torch.equal(gradient_before, gradient_after)
        assert not gradient_after[of_changed].any()

    def test_its_trial_accepts_packed_texts(self):
        hoisted, reason = hoist_if_exact(make_on_gpu(), [list(range(5, 60)), list(range(9, 40))], 2)
        assert reason is None
        assert len(hoisted._restarts.layers) == 2
        hoisted.remove()

    def test_one_graph_is_right_for_texts_of_other_lengths(self):
        model = make_on_gpu()
        batches = [pack(lengths) for lengths in ((150, 1, 64, 71), (3, 140, 140, 3), (71, 71, 72, 72))]
        with hoist(model) as hoisted:
            captured = CapturedGradients(hoisted)
            captured.prepare(batches)
            for tokens in batches + batches[::-1]:
                expected = gradients(model, hoisted.row_losses(tokens.to("cuda")))
                model.zero_grad()
                captured.add(tokens)
                pairs = [(expected[name], each.grad) for name, each in model.named_parameters()]
                one, other = (
                    torch.cat([each.flatten().float() for each in found]) for found in zip(*pairs, strict=True)
                )
                # In bf16; lengths of another batch change most of it.
                assert (one - other).norm() <= 0.03 * one.norm()
            with gpu_sync_forbidden():
                captured.add(tokens)
