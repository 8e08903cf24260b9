"""The benchmark of several GPUs: all of it in processes on the CPU, and what it refuses."""

import pytest
import torch
from processes import process_group

import several_gpus
import tables
from models import WrongGradients

CPU = torch.device("cpu")


def test_every_way_is_checked_and_timed_in_two_processes():
    rows = several_gpus.launch(2, tiny=True)
    measured = [(row["way"], row["variant"]) for row in rows]
    assert measured[:4] == [("DDP", "dense"), ("DDP", "sparsify"), ("FSDP2", "dense"), ("FSDP2", "sparsify")]
    assert all(row["gpus"] == 2 and row["step_ms"] > 0 and 0 < row["gradient_error"] < 0.05 for row in rows)


def test_wrong_gradients_are_not_timed(tmp_path, monkeypatch):
    plain = several_gpus.plain

    def wrong(model, batch_size):
        training = plain(model, batch_size)
        return training._replace(gradients=lambda: {name: 1.1 * each for name, each in training.gradients().items()})

    with process_group(f"file://{tmp_path}/rendezvous"):
        case = several_gpus.the_case(tiny=True)
        assert [row["variant"] for row in several_gpus.measure(case, CPU)] == ["dense", "sparsify"]
        monkeypatch.setattr(several_gpus, "plain", wrong)
        with pytest.raises(WrongGradients, match="one GPU, dense: its gradients are off"):
            list(several_gpus.measure(case, CPU))


def test_the_table_has_a_line_for_each_way(monkeypatch):
    def row(gpus, way, variant, step_ms):
        return {"gpus": gpus, "way": way, "variant": variant, "step_ms": step_ms, "peak_gib": 20.0}

    found = [row(1, "one GPU", "dense", 400), row(1, "one GPU", "sparsify", 200)]
    found += [row(2, "DDP", "dense", 500), row(2, "DDP", "sparsify", 250)]
    monkeypatch.setattr(tables, "rows", lambda name: found)
    monkeypatch.setattr(tables, "recorded", lambda name: "Recorded.")
    line = next(line for line in tables.several_gpus().splitlines() if "2 GPUs, DDP" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("2 GPUs, DDP", "500 ms", "250 ms", "1.60", "1.60", "20.0 GiB", "20.0 GiB")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tiny", "--record"], "--record is for GPU runs only"),
        ([], "2 GPUs are needed, and there are 1; --tiny"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        several_gpus.main(arguments)
    assert words in capsys.readouterr().err
