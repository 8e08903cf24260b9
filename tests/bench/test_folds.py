"""The benchmark of trainings side by side compares steps that are right, and times both."""

import pytest
import torch

from speed import folds


@pytest.fixture
def short(monkeypatch):
    """Few tokens, and one step in each turn; leaves the random state as it was."""
    for name, value in {"TOKENS": (20,), "TURNS": 1, "STEPS_PER_TURN": 1}.items():
        monkeypatch.setattr(folds, name, value)
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.slow
def test_one_step_and_three_side_by_side_are_timed(short, capsys):
    folds.main(["--tiny"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tokens 20, largest_error ")
    assert " times " in line


@pytest.mark.slow
def test_steps_that_are_wrong_are_not_timed(short, monkeypatch):
    pack = folds.SideBySide._pack
    monkeypatch.setattr(folds.SideBySide, "_pack", lambda together, step: pack(together, step).weighted(1.1))
    with pytest.raises(SystemExit, match="differs from its own alone"):
        folds.main(["--tiny"])


def test_tiny_shapes_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        folds.main(["--tiny", "--record"])
    assert "--record is for GPU runs only" in capsys.readouterr().err
