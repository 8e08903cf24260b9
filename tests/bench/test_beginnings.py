"""The benchmark of shared beginnings compares steps that are right, and times both."""

from dataclasses import replace

import pytest
import torch

from speed import beginnings


@pytest.fixture
def own_random_state():
    """Leaves the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.slow
def test_both_steps_are_timed_and_the_shared_one_has_fewer_rows(own_random_state, capsys):
    beginnings.main(["--tiny"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("notes 1, questions 10, rows 2270, shared_rows 470, unshared_error ")
    assert " times_as_fast " in line


@pytest.mark.slow
def test_a_shared_step_that_is_wrong_is_not_timed(own_random_state, monkeypatch):
    inner = beginnings.share_beginnings

    def with_other_targets(tokens, **options):
        return replace(inner(tokens, **options), targets=tokens.targets.flip(0))

    monkeypatch.setattr(beginnings, "share_beginnings", with_other_targets)
    with pytest.raises(SystemExit, match="The shared step errs by"):
        beginnings.main(["--tiny"])


def test_tiny_shapes_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        beginnings.main(["--tiny", "--record"])
    assert "--record is for GPU runs only" in capsys.readouterr().err
