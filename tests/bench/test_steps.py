"""The benchmark of variants: correct ones are timed, wrong ones are refused, and one that fails stops no other."""

import re
from contextlib import contextmanager

import pytest
import torch
from builders import make_examples, make_llama
from failing_memory import PlainGraphs

from sebp_edge.errors import OptionError, SparsityError
from speed import steps
from speed.steps import PACKED, STEPS_PER_ROUND, VARIANTS, compare, padded_length, random_batch
from speed.trainers import steps as trainers_steps
from speed.trainers.reference import loss_and_gradients, references
from speed.trainers.steps import Variant
from speed.trainers.timer import Times, medians, running
from speed.trainers.variants import DROP_IN, HOISTED, OUR_STEP, PADDED, packed, padded_to_longest

CPU = torch.device("cpu")
AVAILABLE = VARIANTS[:-1]
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def make_batch(lengths=(9, 3, 14), context_length=32, prompt=0):
    return random_batch(make_examples(lengths, prompt), context_length, 320, CPU)


def failing(name, error):
    def loss(model, batch):
        raise error

    return Variant(name, PADDED.attach, loss)


# ------------------------------------------------------------------------------------------------------------ compare


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "prompt"), [((2,), 0), ((2, 9, 31), 4), ((32,), 0)], ids=str)
def test_every_variant_computes_what_the_model_computes_without_padding(lengths, prompt):
    rows = compare(make_llama(), make_batch(lengths, prompt=prompt), rounds=1)
    assert [row["variant"] for row in rows] == [variant.name for variant in VARIANTS]
    for row in rows[:-1]:
        assert row["status"] == "ok"
        assert max(row["loss_error"], row["gradient_error"]) < 1e-5
        assert {"forward_ms", "backward_ms", "step_ms"} <= row.keys()
    assert rows[-1] == {"variant": "graph", "status": "CUDA graphs need an NVIDIA GPU"}


def test_the_captured_variant_makes_the_same_steps(plain_graphs, monkeypatch):
    monkeypatch.setattr(trainers_steps, "GraphPool", PlainGraphs)
    found, parts = {}, []
    for variant in (HOISTED, OUR_STEP):
        model, batch = make_llama(), make_batch()
        with variant.attach(model) as handle:
            step = variant.step(handle, model, batch)
            loss = float(step.gradients())
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            before = [parameter.detach().clone() for parameter in model.parameters()]
            step(parts.append)
            moves = [after.detach() - old for after, old in zip(model.parameters(), before, strict=True)]
            found[variant] = loss, gradients, moves
            step.release()
    (loss, gradients, moves), (other_loss, other_gradients, other_moves) = found.values()
    assert loss == pytest.approx(other_loss, rel=1e-5)
    for one, other in zip(gradients, other_gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    # Adam's first step is about as long as the learning rate wherever a gradient is not close to zero.
    for one, other, gradient in zip(moves, other_moves, gradients, strict=True):
        has_gradient = gradient.abs() > 1e-5
        assert has_gradient.any() and one[has_gradient].abs().max() > 5e-6
        assert torch.allclose(one[has_gradient], other[has_gradient], atol=2e-6)
    assert parts == ["forward", "backward", "update", "forward and backward", "update"]


def test_the_reference_is_in_fp32_and_changes_no_weight():
    model, batch = make_llama().bfloat16(), make_batch()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    reference = references(model, batch, [3])[3]
    exact = references(make_llama().bfloat16().float(), batch, [3])[3]
    assert reference.loss == pytest.approx(exact.loss, rel=1e-6)
    torch.testing.assert_close(reference.gradients, exact.gradients)
    assert reference.allowed.gradient_error > 10 * exact.allowed.gradient_error > 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_bf16_variants_are_within_their_tolerance():
    found = compare(make_llama().bfloat16(), make_batch(), (PADDED, DROP_IN, HOISTED), rounds=1)
    assert [row["status"] for row in found] == ["ok"] * 3
    assert all(1e-4 < row["gradient_error"] < 0.1 for row in found)


@contextmanager
def doubling_a_gradient(model):
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    yield model
    handle.remove()


def with_a_mask_of_ones(model, row):
    """Lets texts in one row attend to each other."""
    mask = torch.ones_like(row["input_ids"])
    return model(input_ids=row["input_ids"], labels=row["labels"], attention_mask=mask, use_cache=False).loss


def scaled(factor):
    return Variant("wrong", PADDED.attach, lambda model, batch: factor * PADDED.loss(model, batch), PADDED.lay_out)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (scaled(0.5), "its loss is off by 5.0e-01, above 1.0e-04"),
        (scaled(float("nan")), "its loss is off by nan, above 1.0e-04"),
        (Variant("wrong", doubling_a_gradient, PADDED.loss, PADDED.lay_out), "its gradients are off by "),
        (Variant("wrong", PADDED.attach, with_a_mask_of_ones, packed), "its "),
    ],
    ids=["half", "NaN", "gradients", "attention between texts"],
)
def test_what_is_wrong_is_refused_and_not_timed(wrong, reason):
    good, bad = compare(make_llama(), make_batch(), (PADDED, wrong), rounds=1)
    assert good["status"] == "ok"
    assert bad["status"].startswith(f"wrong: {reason}")
    assert "step_ms" not in bad


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError(OUT_OF_MEMORY), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (SparsityError("This does not run on rows."), "SparsityError: This does not run on rows."),
        (TypeError("forward() got\nan argument"), "TypeError: forward() got"),
    ],
    ids=["memory", "GPU memory", "unfit", "other"],
)
def test_a_variant_that_fails_has_its_row_and_the_others_go_on(error, status):
    bad, good = compare(make_llama(), make_batch(), (failing("bad", error), PADDED), rounds=1)
    assert bad == {"variant": "bad", "status": status}
    assert good["status"] == "ok"


@pytest.mark.slow
def test_running_out_of_memory_in_a_later_round_is_reported_and_first_steps_are_not_timed():
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) > 2 + 1 + STEPS_PER_ROUND:  # two passes are checked, and one step warms up
            raise MemoryError
        return PADDED.loss(model, batch)

    model = make_llama()
    late = Variant("late", PADDED.attach, loss, PADDED.lay_out)
    assert compare(model, make_batch(), (late,), rounds=1)[0]["status"] == "ok"
    calls.clear()
    bad, good = compare(model, make_batch(), (late, PADDED), rounds=2)
    assert bad["status"] == "out of memory"
    assert "gradient_error" in bad and "step_ms" not in bad
    assert "step_ms" in good
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_the_model_is_restored():
    model = make_llama()
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    compare(model, make_batch(), AVAILABLE, rounds=1)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == attention


def test_dynamic_padding_and_packing_keep_all_tokens():
    batch = make_batch((2, 5, 11), context_length=16)
    shorter, row = padded_to_longest(batch), packed(batch)
    assert shorter["input_ids"].shape == (3, 11)
    assert row["input_ids"].shape == (1, 18)
    assert torch.equal(row["input_ids"][0], batch.input_ids[batch.attention_mask.bool()])
    assert row["position_ids"][0].tolist() == [*range(2), *range(5), *range(11)]
    assert row["cu_seq_lens_q"].tolist() == [0, 2, 7, 18]
    assert (row["labels"][0] == -100).nonzero().flatten().tolist() == [0, 2, 7]


def test_variants_of_this_project_are_marked():
    assert [variant for variant in VARIANTS if variant.is_ours] == [DROP_IN, HOISTED, OUR_STEP]
    assert not PACKED.is_ours


def test_sampled_gradients_are_elements_of_the_gradients():
    model, batch = make_llama(), make_batch()
    with running(model, batch, PADDED) as step:
        _, some = loss_and_gradients(step, model)
        step.gradients()
        every = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert every.keys() == some.keys()
    for name, whole in every.items():
        assert torch.equal(some[name], whole.flatten()[:: max(1, whole.numel() // 4096)])


def test_medians_are_of_each_part_and_the_peak_is_the_highest():
    found = medians([Times(1.0, 5.0, 9.0, 7), Times(2.0, 4.0, 8.0, 9), Times(3.0, 3.0, 7.0, 8)])
    assert found == Times(2.0, 4.0, 8.0, 9)
    assert medians([Times(None, None, 9.0, None)]) == Times(None, None, 9.0, None)


# -------------------------------------------------------------------------------------------------------------- texts


def test_the_built_in_lengths_are_those_of_short_notes():
    lengths = steps.built_in_lengths(1000)
    assert (lengths[500], steps.built_in_lengths(1)) == (30, [30])
    assert lengths[900] == pytest.approx(90, abs=1)
    assert min(steps.built_in_lengths(100_000)) >= 2


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.931])
def test_padding_sets_the_context_length(share):
    context_length = padded_length(make_examples([3, 5, 7]), share)
    assert 1 - 15 / (3 * context_length) >= share > 1 - 15 / (3 * (context_length - 1))


def test_less_padding_than_the_longest_text_leaves_is_refused():
    examples = make_examples([10, 10, 40])
    assert padded_length(examples, 0.5) == 40
    with pytest.raises(OptionError, match=r"at least 0\.50 padding; ask for that or more"):
        padded_length(examples, 0.48)


def test_a_batch_has_the_lengths_and_the_losses_but_not_the_tokens_of_the_texts():
    examples = make_examples([9, 4, 12], prompt=3)
    batch = random_batch(examples, 16, 50, CPU)
    assert batch.attention_mask.sum(dim=1).tolist() == [4, 9, 12]
    assert (batch.labels != -100).sum(dim=1).tolist() == [1, 6, 9]
    assert batch.input_ids.shape == (3, 16)
    assert int(batch.input_ids.max()) < 50
    assert torch.equal(batch.input_ids, random_batch(examples, 16, 50, CPU).input_ids)
    assert random_batch(examples, 8, 50, CPU).attention_mask.sum(dim=1).tolist() == [4, 8, 8]


# ------------------------------------------------------------------------------------------------------------- script


@pytest.fixture
def bench(model_folder, capsys):
    """Runs the script with a model that takes a second; returns what it prints."""

    def run(*arguments, model=model_folder):
        steps.main(["--device", "cpu", "--model", str(model), *map(str, arguments)])
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_texts_of_ones_own_are_spread_over_their_lengths(bench, notes_folder):
    lines = bench(notes_folder, "--context", 64, "--batch", 3).splitlines()
    assert len(lines) == len(VARIANTS)
    assert all(re.match("model micro-llama, trained lora, tokens \\d+, padding_share 0\\.", line) for line in lines)
    assert [line.split("status ")[1].split(",")[0] for line in lines] == 5 * ["ok"] + ["CUDA graphs need an NVIDIA GPU"]


@pytest.mark.slow
def test_a_config_alone_is_enough_and_padding_is_as_requested(bench, tmp_path):
    make_llama(num_hidden_layers=1).config.save_pretrained(tmp_path / "only")
    model = tmp_path / "only" / "config.json"
    said, *lines = bench("--padding", 0.6, "--recipe", "full", model=model).splitlines()
    assert said.startswith("The weights of 'only' are not on this machine, so random weights ")
    assert all(line.startswith("model only, trained full, tokens 153, padding_share 0.60") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--padding", 0.9, "--context", 64), "not allowed with argument"),
        (("--padding", 1), "The padding is a share of the batch below 1"),
        (("--padding", 0.99), "takes 128"),
        (("--context", 129), "would be padded to 129 tokens"),
        (("--context", 7), "context_length must be a whole number of at least 8"),
        (("--recipe", "note"), "did you mean 'notes'?"),
        (("--recipe", "four.toml"), "quantises the model"),
        (("--device", "mps"), "'mps' is not usable"),
        (("missing",), "There is no file or folder"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_in_a_sentence(bench, capsys, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.toml").write_text("load_in_4bit = true\n")
    with pytest.raises(SystemExit):
        bench(*arguments)
    assert reason in capsys.readouterr().err
