"""The benchmark against other trainers: the same work for all, a row for everyone, and no time for what is wrong."""

import json
import sys
from dataclasses import replace
from importlib.metadata import packages_distributions, version

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from failing_memory import PlainGraphs
from torch import nn

from speed import peers
from speed.trainers import attention, flash_attn, four_bit, process, runs, steps
from speed.trainers.arms import ARMS, FOUR_BIT, FULL, LORA, LOSS_SHARE
from speed.trainers.limit import Ceilings, Size, limit_ms
from speed.trainers.reference import references
from speed.trainers.steps import trained
from speed.trainers.work import TINY, Job, fill, lengths, make_base, make_batch, make_model, make_texts

TEXTS = 3
H100 = Ceilings(765e12, 3.0e12)


def make_job(folder, **changes):
    fields = {
        "shape": TINY,
        "device": "cpu",
        "full": False,
        "four_bit": False,
        "loss_share": 1.0,
        "batches": [1, TEXTS],
        "save_model": False,
    }
    return Job(**fields | {"folder": str(folder)} | changes)


def rows_of(arm, job):
    return list(process.measure(arm, job, repeats=1))


def sequence_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch's varlen attention computes on a GPU."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == torch.int32
    assert key.shape == value.shape
    assert max_q == int(cu_seq_q.diff().max())
    parts = zip(*(states.split(cu_seq_q.diff().tolist()) for states in (query, key, value)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in part), is_causal=True, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
            for part in parts
        ]
    )


@pytest.fixture
def short(monkeypatch, plain_graphs):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", sequence_by_sequence)
    monkeypatch.setitem(attention.SHARED_HEADS, "enable_gqa", True)
    monkeypatch.setattr(steps, "GraphPool", PlainGraphs)


def runnable(table):
    """The arms of a table that run on a CPU if graphs are plain."""
    return [
        name
        for name, arm in ARMS.items()
        if table in arm.tables and not set(arm.packages) - {"bitsandbytes"} and not arm.apart and arm.max_texts == 64
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({"batches": [TEXTS]}, LORA),
        ({"four_bit": True, "batches": [TEXTS]}, FOUR_BIT),
        ({"loss_share": 0.25, "batches": [TEXTS]}, LOSS_SHARE),
    ],
    ids=["LoRA", "4 bits", "a share of the loss"],
)
def test_every_arm_makes_the_step_of_the_reference(tmp_path, short, changes, table):
    if table == FOUR_BIT:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    job = make_job(tmp_path, **changes)
    process.make_reference(job)
    names = runnable(table)
    assert {"hf packed varlen", "hf graph", "sebp-edge step"} <= set(names)
    for name in names:
        right_row_of(name, job)


def right_row_of(name, job):
    """The row of an arm for the one batch of a job, which is checked."""
    (row,) = rows_of(ARMS[name], job)
    assert row["status"] == "ok", (name, row)
    assert row["tokens"] == sum(lengths(job.loss_share)[:TEXTS])
    assert row["gradient_error"] < 1e-4
    assert row["step_ms"] > 0
    return row


@pytest.mark.slow
def test_rows_of_all_weights_are_right_and_say_what_the_moments_are_and_take(tmp_path, short):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    job = make_job(tmp_path, full=True, batches=[TEXTS])
    process.make_reference(job)
    weights = [weight.numel() for weight in make_model(job).parameters()]
    fp32 = {"moments": "fp32", "moments_bytes": 8 * sum(weights)}
    for name in sorted({*runnable(FULL)} - {"hf packed varlen adamw8bit"}):
        row = right_row_of(name, job)
        assert fp32.items() <= row.items(), name
        assert row["trained_bytes"] == 4 * sum(weights)
    row = right_row_of("hf packed varlen adamw8bit", job)
    assert row["moments"] == "8 bits"
    # Norms stay in fp32; 256 elements share a scale; two tables of 256 values are shared by all.
    small = sum(size for size in weights if size < 4096)
    assert row["moments_bytes"] == 8 * small + (2 + 8 / 256) * (sum(weights) - small) + 2 * 256 * 4


@pytest.mark.parametrize("changes", [{}, {"full": True}, {"loss_share": 0.25}], ids=["LoRA", "all", "share"])
def test_one_pass_gives_the_references_of_all_batches(tmp_path, changes):
    job = make_job(tmp_path, batches=[1, 2, TEXTS], **changes)
    model = make_model(job)
    fill(trained(model))
    found = references(model, make_batch(TEXTS, job), job.batches)
    assert list(found) == job.batches
    for count, reference in found.items():
        alone = references(model, make_batch(count, job), [count])[count]
        deviation = reference.deviation(alone.loss, alone.gradients)
        assert deviation.loss_error < 1e-6
        assert deviation.gradient_error < 1e-6


def test_in_4_bits_the_reference_has_the_weights_of_the_trainers(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    job = make_job(tmp_path, four_bit=True)
    plain, rounded, quantised = (make_base(job).eval() for _ in range(3))
    four_bit.round_(rounded)
    four_bit.quantise_(quantised)
    kinds = {name: type(layer) for name, layer in quantised.named_modules() if isinstance(layer, nn.Linear)}
    assert [name for name, kind in kinds.items() if kind is nn.Linear] == ["lm_head"]
    ids = make_batch(1, job).input_ids[:, :40]
    with torch.no_grad():
        exact, expected, found = (model(input_ids=ids).logits for model in (plain, rounded, quantised))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (exact - expected).norm() > 0.01 * exact.norm()


@pytest.mark.slow
def test_what_is_wrong_is_not_timed(tmp_path, short):
    job = make_job(tmp_path)
    process.make_reference(job)
    arm = ARMS["hf dynamic padding"]

    def half_a_gradient(job):
        model = arm.load(job)
        next(p for p in model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient / 2)
        return model

    def other_labels(batch):
        inputs = arm.variant.lay_out(batch)
        return inputs | {"labels": inputs["labels"].roll(1, dims=1)}

    wrong = [replace(arm, load=half_a_gradient), replace(arm, variant=replace(arm.variant, lay_out=other_labels))]
    for each, reason in zip(wrong, ("its gradients are off by", "its"), strict=True):
        for row in rows_of(each, job):
            assert row["status"].startswith(f"wrong: {reason}")
            assert "step_ms" not in row


def test_a_batch_that_fails_or_is_left_out_has_its_row_and_the_next_goes_on(tmp_path, short):
    job = make_job(tmp_path, batches=[1, 2, TEXTS])
    process.make_reference(job)
    arm = ARMS["hf dynamic padding"]

    def memory_for_one(batch):
        if len(batch.input_ids) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return arm.variant.lay_out(batch)

    rows = rows_of(replace(arm, variant=replace(arm.variant, lay_out=memory_for_one), max_texts=2), job)
    assert [row["status"] for row in rows] == ["out of memory", "ok", "not run with more than 2 texts"]


@pytest.mark.slow
def test_arms_run_in_turn_and_those_that_cannot_have_rows_that_say_why(capsys, warm):
    asked = ["unsloth packed", "hf graph", "sebp-edge hoisted"]
    peers.main(["--tiny", "--batches", "1,2", "--arms", ",".join(asked)])
    said = capsys.readouterr().out
    # Each row once as it was found and once in the table.
    assert said.count("needs unsloth, which is not installed") == 4
    assert said.count("CUDA graphs need an NVIDIA GPU") == 4
    found = [line for line in said.splitlines() if line.startswith("arm sebp-edge hoisted")]
    assert [("tokens 80," in row, "tokens 106," in row) for row in found] == 2 * [(True, False), (False, True)]
    assert all("status ok" in row and "moments fp32" in row for row in found)


@pytest.fixture
def arm_script(tmp_path, monkeypatch):
    """The script that computes an arm, in place of the real one."""
    script = tmp_path / "process.py"
    monkeypatch.setattr(runs, "PROCESS", [str(script)])
    return script


def test_a_process_that_fails_or_hangs_is_ended_and_the_next_one_runs(arm_script, tmp_path, monkeypatch):
    arm_script.write_text(
        "import sys, time\n"
        "if sys.argv[1] == 'lacks': sys.exit('no such package')\n"
        "print('imported', flush=True); sys.stdin.readline()\n"
        "if sys.argv[1] == 'fails': sys.exit('no such kernel')\n"
        "if sys.argv[1] == 'hangs': time.sleep(60)\n"
        """print('{"texts": 1}')\n"""
    )
    job = make_job(tmp_path)
    ends = runs.run_in_turn([(name, job) for name in ("lacks", "fails", "hangs", "works")])
    lacks, fails = next(ends), next(ends)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "ARM_SECONDS", 0.1)
        hangs = next(ends)
    (works,) = ends
    assert lacks == (False, [], "ended with code 1: no such package")
    assert fails == (False, [], "ended with code 1: no such kernel")
    assert hangs == (False, [], "stopped after 0.1 s")
    assert works[:2] == (True, [{"texts": 1}])


@pytest.fixture
def own_finders():
    """Removes what finds modules for the test only."""
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


@pytest.mark.usefixtures("own_finders")
def test_flash_attn_is_found_and_computes_what_torch_does(short, monkeypatch):
    for module in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        # Undone after the test.
        monkeypatch.setitem(sys.modules, module, None)
    flash_attn.install()
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.flash_attn_interface import flash_attn_gpu

    assert version("flash-attn") == flash_attn.VERSION
    assert packages_distributions()["flash_attn"] == ["flash-attn"]
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    packed = flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, dropout_p=0.0, causal=True)
    for text in (slice(0, 4), slice(4, 6)):
        alone = flash_attn_func(*(each[None, text] for each in (q, k, v)), causal=True)[0]
        torch.testing.assert_close(packed[text], alone)
    with pytest.raises(ValueError, match=r"causal self-attention without dropout.*; add any other to speed\.trainers"):
        flash_attn_varlen_func(q, k, v, ends, ends, 4, 4)
    with pytest.raises(RuntimeError, match=r"has flash_attn_gpu to be imported, not called; add it to speed\.trainers"):
        flash_attn_gpu(q, k, v)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tiny", "--record"], "tiny shapes are no evidence"),
        (["--tiny", "--arms", "hf packed varlen,trainer"], "no arm is called 'trainer'"),
        (["--tiny", "--batches", "0"], "--batches takes numbers from 1 to 64"),
        (["--tiny", "--batches", "4,many"], "--batches takes numbers from 1 to 64"),
        (["--tiny", "--loss-share", "1.5"], "give more than 0 and at most 1"),
        (["--tiny", "--full", "--4bit"], "weights in 4 bits cannot be trained"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(capsys, arguments, reason):
    with pytest.raises(SystemExit):
        peers.main(arguments)
    assert reason in capsys.readouterr().err


def test_the_work_is_the_same_in_each_process_and_the_one_that_was_agreed_on(tmp_path):
    assert [sum(lengths(1.0)[:count]) for count in (1, 4, 16, 64)] == [80, 212, 836, 3727]
    job = make_job(tmp_path)
    assert make_texts(4, job)[:TEXTS] == make_texts(TEXTS, job)
    one, other = make_model(job), make_model(job)
    for model in (one, other):
        fill([parameter for parameter in model.parameters() if parameter.requires_grad])
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_the_limit_counts_weights_gradients_and_moments(tmp_path):
    size = Size.of(make_job(tmp_path, shape="llama-3.2-3b"))
    assert size == (Size(3_212_749_824, 2 * 3_212_749_824))
    # All weights in bf16 with moments in bf16: ten passes over the weights; with 8-bit moments eight.
    weights = 2 * size.parameters
    for moments, passes in ((2 * weights, 10), (weights, 8)):
        assert limit_ms(size, 80, True, weights, moments, H100) == pytest.approx(1e3 * passes * weights / 3.0e12)
    # LoRA on one text: the frozen weights twice, and the adapters' share.
    assert limit_ms(size, 80, False, 0, 0, H100) == pytest.approx(4.28, abs=0.01)
    adapters = 4 * 24_313_856
    assert limit_ms(size, 80, False, adapters, 2 * adapters, H100) == pytest.approx(4.54, abs=0.01)
    assert limit_ms(size, 3727, False, adapters, 2 * adapters, H100) == pytest.approx(62.6, abs=0.05)
    assert limit_ms(size, 3727, True, weights, weights, H100) == pytest.approx(93.9, abs=0.05)
    # A quarter of what the layers' weights take in bf16, and the head as it is.
    in_4_bits = Size.of(make_job(tmp_path, shape="llama-3.2-3b", four_bit=True))
    assert in_4_bits.weight_bytes == pytest.approx(2 * 394e6 + 0.516 * 2819e6, rel=1e-3)
    # Without the embeddings that each layer of Gemma 4 looks up.
    assert Size.of(make_job(tmp_path, shape="gemma-4-e2b")).parameters == 2_279_759_104


def test_ratios_are_to_the_fastest_other_trainer_that_is_right(tmp_path):
    held = {"texts": 64, "tokens": 3727, "status": "ok", "trained_bytes": 97e6, "moments_bytes": 194e6}
    rows = [
        held | {"arm": "hf packed varlen", "step_ms": 276.0},
        {"arm": "unsloth packed", "texts": 64, "tokens": 3727, "status": "wrong: its loss"},
        held | {"arm": "liger packed varlen", "step_ms": 225.0},
        held | {"arm": "sebp-edge hoisted", "step_ms": 90.0},
    ]
    peers.compare(rows, make_job(tmp_path, shape="llama-3.2-3b"), H100)
    assert [row.get("to_fastest_peer") for row in rows] == [pytest.approx(276 / 225), None, 1.0, 0.4]
    assert rows[3]["to_limit"] == pytest.approx(90 / rows[3]["limit_ms"])
    assert json.dumps(rows)
