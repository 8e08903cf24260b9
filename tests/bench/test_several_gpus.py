"""The benchmark of several GPUs: all of it in processes on the CPU, and what it refuses."""

import pytest
import torch
from processes import process_group

from models import WrongGradients
from speed import several_gpus

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_way_is_checked_and_timed_in_two_processes():
    rows = several_gpus.launch(2, tiny=True)
    measured = [(row["way"], row["variant"]) for row in rows]
    assert measured[:4] == [("DDP", "dense"), ("DDP", "sparsify"), ("FSDP2", "dense"), ("FSDP2", "sparsify")]
    assert all(row["gpus"] == 2 and row["step_ms"] > 0 and 0 < row["gradient_error"] < 0.05 for row in rows)


def test_wrong_gradients_are_not_timed(tmp_path, monkeypatch):
    plain = several_gpus.plain

    def wrong(model):
        training = plain(model)
        return training._replace(gradients=lambda: {name: 1.1 * each for name, each in training.gradients().items()})

    with process_group(f"file://{tmp_path}/rendezvous"):
        case = several_gpus.the_case(tiny=True)
        assert [row["variant"] for row in several_gpus.measure(case, CPU)] == ["dense", "sparsify"]
        monkeypatch.setattr(several_gpus, "plain", wrong)
        with pytest.raises(WrongGradients, match="one GPU, dense: its gradients are off"):
            list(several_gpus.measure(case, CPU))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tiny", "--record"], "--record is for GPU runs only"),
        ([], f"2 GPUs are needed, and there are {torch.cuda.device_count()}; --tiny"),
    ],
)
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are enough GPUs here")
def test_what_cannot_be_measured_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit):
        several_gpus.main(arguments)
    assert words in capsys.readouterr().err
