"""Linear attention on packed rows: with fla-core's kernels it computes what the dense model does, and without kernels
that agree it stays what it is."""

import copy
import random
import sys

import pytest
import torch
import triton
from against_dense import assert_same_gradients, dense_losses, gradients, padded_batch
from builders import SIZES, gpu_sync_forbidden, hoist
from model_families import LINEAR, WITH_STATES, make_model
from transformers import Qwen3_5TextConfig, Qwen3NextConfig

from sebp_edge.engine.models.libraries import without_fla
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches import delta_rule
from sebp_edge.engine.sparse.patches.agreement import graph_cut_after
from sebp_edge.engine.sparse.patches.delta_rule import CHUNK, kernel_for, packed_options
from sebp_edge.engine.training.captured_gradients import CapturedGradients
from sebp_edge.research import ActiveTokens, RowPlan

FAMILIES = {
    "qwen3.5": WITH_STATES["qwen3.5"],
    "qwen3-next": lambda: make_model(Qwen3NextConfig(**SIZES, head_dim=8, **LINEAR, mlp_only_layers=[0, 1])),
}
# Of several chunks, of one row, shorter than a convolution's kernel, of exactly one chunk.
LENGTHS = (150, 1, 2, 64, 70)
# In place of fla's package: transformers' own rule on each text, and one that does not restart.
RIGHT = """
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule

def chunk_gated_delta_rule(query, key, value, g, beta, cu_seqlens, chunk_indices, use_qk_l2norm_in_kernel, **options):
    lengths = cu_seqlens.diff().tolist()
    texts = zip(*(each.split(lengths, dim=1) for each in (query, key, value, g, beta)))
    outs = [rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0] for q, k, v, g, b in texts if q.shape[1]]
    return torch.cat(outs, dim=1), None
"""
WRONG = RIGHT.replace("cu_seqlens.diff().tolist()", "[query.shape[1]]")


@pytest.fixture
def fla(request, tmp_path, monkeypatch):
    """A package with fla's name and function, which runs on a CPU; models are imported before."""
    with without_fla():
        [make() for make in FAMILIES.values()]
    folder = tmp_path / "fla" / "ops"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "gated_delta_rule.py").write_text(request.param)
    metadata = tmp_path / f"fla_core-{request.node.name}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: fla-core\nVersion: 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(delta_rule, "DEVICES", ("cpu",))
    delta_rule._tried.cache_clear()
    yield
    delta_rule._tried.cache_clear()


def batch_of(lengths):
    return padded_batch(lengths, max(lengths) + 1)


def pack(batch):
    return ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"]))


@pytest.mark.parametrize("fla", [RIGHT], indirect=True, ids=["right"])
@pytest.mark.parametrize("options", [{}, {"checkpoints": 1}], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_dense_losses_and_gradients(fla, family, options):
    model, batch = FAMILIES[family](), batch_of(LENGTHS)
    expected = dense_losses(model, batch)
    expected_gradients = gradients(model, expected)
    with hoist(model, **options) as hoisted:
        assert hoisted._restarts._reach == 3
        found = hoisted.row_losses(pack(batch))
        found_gradients = gradients(model, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(expected_gradients, found_gradients, 1e-3, 1e-5)
    assert torch.equal(dense_losses(model, batch), expected)


@pytest.mark.parametrize("fla", [RIGHT], indirect=True, ids=["right"])
def test_its_trial_accepts_packed_rows(fla):
    hoisted, reason = hoist_if_exact(FAMILIES["qwen3.5"](), [list(range(5, 60)), list(range(9, 40))], 2)
    assert reason is None
    assert hoisted._restarts._reach == 3
    hoisted.remove()


@pytest.mark.parametrize("fla", [WRONG, "raise RuntimeError", ""], indirect=True, ids=["wrong", "broken", "empty"])
def test_kernels_that_do_not_agree_are_not_used(fla):
    with hoist(FAMILIES["qwen3.5"]()) as hoisted:
        assert hoisted._restarts.layers
        assert hoisted._restarts._reach is None


def test_every_chunk_has_its_text_and_its_number_and_others_lie_behind_the_last_row():
    for _ in range(200):
        lengths = [random.choice((0, 1, 63, 64, 65, 200, random.randint(1, 999))) for _ in range(random.randint(1, 9))]
        lengths[random.randrange(len(lengths))] = random.randint(1, 200)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        expected = [[text, number] for text, length in enumerate(lengths) for number in range(-(-length // CHUNK))]
        found = packed_options(cu_seqlens, sum(lengths))["chunk_indices"].tolist()
        assert found[: len(expected)] == expected
        assert all(lengths[text] and CHUNK * number >= sum(lengths) for text, number in found[len(expected) :])


def make_on_gpu():
    """A Qwen3.5 with heads of the published size, whose kernels agree with transformers' own code on this GPU."""
    pytest.importorskip("fla", reason="fla-core is not installed: pip install 'sebp-edge[fla]'")
    sizes = SIZES | {"hidden_size": 256, "num_hidden_layers": 3}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128}
    layers = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_value_head_dim": 128}
    with without_fla():
        model = make_model(Qwen3_5TextConfig(**sizes, head_dim=64, **heads, **layers)).to("cuda", torch.bfloat16)
    if kernel_for(model.model.layers[0].linear_attn) is None:
        pytest.skip(f"fla's kernels do not agree with transformers' own code with Triton {triton.__version__}")
    return model


def on_gpu(lengths):
    return {name: each.cuda() for name, each in batch_of(lengths).items()}


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("lengths", [LENGTHS, (33,), (1, 1), (300, 7, 129, 5)])
    def test_gradients_err_no_more_than_those_of_the_dense_model(self, lengths):
        model, batch = make_on_gpu(), on_gpu(lengths)
        exact_model = copy.deepcopy(model).double()
        exact = gradients(exact_model, dense_losses(exact_model, batch))
        dense = gradients(model, dense_losses(model, batch))
        with hoist(model) as hoisted:
            assert hoisted._restarts._reach == 3
            found = gradients(model, hoisted.row_losses(pack(batch)))
        largest = max(gradient.norm() for gradient in exact.values())
        for name, truth in exact.items():
            allowed = 2 * (dense[name] - truth).norm() + 1e-2 * truth.norm() + 1e-4 * largest
            assert (found[name] - truth).norm() <= allowed, name

    @pytest.mark.parametrize("changed", range(len(LENGTHS)))
    def test_no_bit_of_a_text_depends_on_another(self, changed):
        model, batch, results = make_on_gpu(), on_gpu(LENGTHS), []
        of_changed = torch.zeros(sum(LENGTHS), dtype=torch.bool, device="cuda")
        of_changed[sum(LENGTHS[:changed]) :][: LENGTHS[changed]] = True
        with hoist(model) as hoisted:
            for _ in range(2):
                tokens = pack(batch)
                with graph_cut_after(model.get_input_embeddings()) as embedded:
                    losses = hoisted.row_losses(tokens)
                others = losses[tokens.sequences != changed]
                (gradient,) = torch.autograd.grad(others.sum(), embedded)
                results.append((others, gradient.squeeze(0)))
                batch["input_ids"][changed, : LENGTHS[changed]] = 5
        (before, gradient_before), (after, gradient_after) = results
        assert torch.equal(before, after)
        assert torch.equal(gradient_before, gradient_after)
        assert gradient_after[~of_changed].any()
        assert not gradient_after[of_changed].any()

    def test_its_trial_accepts_packed_rows(self):
        hoisted, reason = hoist_if_exact(make_on_gpu(), [list(range(5, 60)), list(range(9, 40))], 2)
        assert reason is None
        assert hoisted._restarts._reach == 3
        hoisted.remove()

    def test_one_graph_is_right_for_texts_of_other_lengths(self):
        model = make_on_gpu()
        batches = [pack(batch_of(lengths)) for lengths in ((150, 1, 64, 71), (3, 140, 140, 3), (71, 71, 72, 72))]
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
