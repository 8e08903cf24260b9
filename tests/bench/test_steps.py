"""The benchmark of variants: correct ones are timed, wrong ones are refused, and one that fails stops no other."""

import re
from contextlib import contextmanager

import pytest
import torch
from builders import make_examples, make_llama

from sebp_edge.errors import SparsityError
from speed import steps
from speed.steps import STEPS_PER_ROUND, VARIANTS, compare, random_batch
from speed.trainers.reference import references
from speed.trainers.steps import Variant
from speed.trainers.variants import PADDED, packed

CPU = torch.device("cpu")
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


# -------------------------------------------------------------------------------------------------------------- texts


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
