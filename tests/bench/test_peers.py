"""The benchmark against other trainers: the same work for all, a row for everyone, and no time for what is wrong."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import peer_process
import peers
from peer_arms import ARMS
from peer_work import TINY, Job, fill, lengths, make_model, make_texts, shape_config
from sebp_edge.rows.row_plan import IGNORE

TEXTS = 3


def make_job(folder, **changes):
    fields = {
        "shape": TINY,
        "device": "cpu",
        "full": False,
        "loss_share": 1.0,
        "batches": [1, TEXTS],
        "save_model": False,
    }
    return Job(**fields | {"folder": str(folder)} | changes)


def sequence_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """What torch's varlen attention computes on a GPU."""
    assert window_size == (-1, 0)
    assert (cu_seq_q.dtype, query.shape) == (torch.int32, key.shape)
    assert max_q == int(cu_seq_q.diff().max())
    parts = zip(*(states.split(cu_seq_q.diff().tolist()) for states in (query, key, value)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in part), is_causal=True, scale=scale
            ).transpose(0, 1)
            for part in parts
        ]
    )


@pytest.fixture
def short(monkeypatch, plain_graphs):
    monkeypatch.setattr(peer_process, "REPEATS", 1)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", sequence_by_sequence)


RUNNABLE = [
    "hf dynamic padding",
    "hf packed",
    "hf packed varlen",
    "hf packed checkpointing",
    "sebp-edge hoisted",
    "sebp-edge step",
]


# The new name is not there in transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, RUNNABLE),
        ({"full": True}, [name for name in RUNNABLE if ARMS[name].full]),
        ({"loss_share": 0.25}, ["hf packed varlen", "sebp-edge all rows", "sebp-edge hoisted", "sebp-edge step"]),
    ],
    ids=["LoRA", "all weights", "a share of the loss"],
)
def test_every_arm_makes_the_step_of_the_reference(tmp_path, short, changes, names):
    job = make_job(tmp_path, **changes)
    peer_process.make_reference(job)
    for name in names:
        rows = list(peer_process.measure(ARMS[name], job))
        assert [row["status"] for row in rows] == ["ok", "ok"], (name, rows)
        for row, count in zip(rows, job.batches, strict=True):
            assert row["tokens"] == sum(lengths(job.loss_share)[:count])
            assert row["gradient_error"] < 1e-4
            assert row["step_ms"] > 0


def test_what_is_wrong_is_not_timed(tmp_path, short):
    job = make_job(tmp_path)
    peer_process.make_reference(job)
    arm = ARMS["hf dynamic padding"]

    def half_a_gradient(job):
        model = arm.load(job)
        next(p for p in model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient / 2)
        return model

    def other_labels(batch):
        return replace(batch, labels=batch.labels.roll(1, dims=1))

    wrong = [replace(arm, load=half_a_gradient), replace(arm, variant=replace(arm.variant, lay_out=other_labels))]
    for each, reason in zip(wrong, ("its gradients are off by", "its"), strict=True):
        for row in peer_process.measure(each, job):
            assert row["status"].startswith(f"wrong: {reason}")
            assert "step_ms" not in row


def test_a_batch_that_fails_or_is_left_out_has_its_row_and_the_next_goes_on(tmp_path, short):
    job = make_job(tmp_path, batches=[1, 2, TEXTS])
    peer_process.make_reference(job)
    arm = ARMS["hf dynamic padding"]

    def memory_for_one(batch):
        if len(batch.input_ids) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return arm.variant.lay_out(batch)

    small = replace(arm, variant=replace(arm.variant, lay_out=memory_for_one), max_texts=2)
    rows = peer_process.measure(small, job)
    assert [row["status"] for row in rows] == ["out of memory", "ok", "not run with more than 2 texts"]


def test_arms_that_cannot_start_have_rows_that_say_why(capsys, monkeypatch):
    monkeypatch.setitem(peers.QUIET, "OMP_NUM_THREADS", "1")
    peers.main(["--tiny", "--batches", "1", "--arms", "unsloth packed,sebp-edge hoisted"])
    said = capsys.readouterr().out
    # Once as it was found and once in the table.
    assert said.count("ModuleNotFoundError: No module named 'unsloth'") == 2
    assert said.count("sebp-edge hoisted") == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tiny", "--record"], "tiny shapes are no evidence"),
        (["--tiny", "--arms", "hf packed,trainer"], "no arm is called 'trainer'"),
        (["--tiny", "--batches", "0"], "--batches takes numbers from 1 to 64"),
        (["--tiny", "--batches", "4,many"], "--batches takes numbers from 1 to 64"),
        (["--tiny", "--loss-share", "1.5"], "give more than 0 and at most 1"),
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


def test_a_share_of_the_loss_is_at_the_end_of_each_text(tmp_path):
    texts = make_texts(64, make_job(tmp_path, loss_share=0.25))
    for text in texts:
        has_loss = [label != IGNORE for label in text.labels]
        assert has_loss == sorted(has_loss)
        assert sum(has_loss) == round(0.25 * len(has_loss))
    counts = sorted(len(text.labels) for text in texts)
    assert 90 < counts[32] < 180
    assert 150 < sum(counts) / 64 < 240


def test_the_true_shapes_are_the_models_own():
    sizes = []
    for shape in peers.SHAPES:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(shape_config(shape))
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes == [3_212_749_824, 596_049_920, 134_515_008]


def test_ratios_are_to_the_fastest_other_trainer_that_is_right(tmp_path):
    job = make_job(tmp_path, shape="llama-3.2-3b")
    rows = [
        {"arm": "hf packed", "texts": 64, "tokens": 3727, "status": "ok", "step_ms": 276.0},
        {"arm": "unsloth packed", "texts": 64, "tokens": 3727, "status": "wrong: its loss"},
        {"arm": "liger packed", "texts": 64, "tokens": 3727, "status": "ok", "step_ms": 225.0},
        {"arm": "sebp-edge hoisted", "texts": 64, "tokens": 3727, "status": "ok", "step_ms": 90.0},
    ]
    peers.compare(rows, job, (765e12, 3.0e12))
    assert [row.get("to_fastest_peer") for row in rows] == [pytest.approx(276 / 225), None, 1.0, 0.4]
    assert rows[3]["limit_ms"] == pytest.approx(62.6, abs=0.05)
    assert peers.limit_ms(3_212_749_824, 80, False, 765e12, 3.0e12) == pytest.approx(4.3, abs=0.02)
    assert json.dumps(rows)
