"""The benchmark of the whole command: its parts add up to the run, and a run that fails is not timed."""

import sys

import pytest
from builders import make_sentences, write_notes

from speed import end_to_end


def events_of(*events):
    """A run from 100 to 120 seconds with these events: arrival time, name, and other fields."""
    return [(arrival, {"event": name, **more}) for arrival, name, more in events]


ARRIVALS = events_of(
    (104.0, "model_loaded", {"parameters": 7}),
    (104.5, "texts_read", {}),
    (106.0, "graph_captured", {"part": "update", "seconds": 0.5}),
    (106.5, "training_started", {}),
    (107.0, "evaluated", {}),
    (109.5, "graph_captured", {"part": "gradients", "seconds": 2.0}),
    (110.0, "step", {"phase": "train", "epoch": 1, "tokens": 40}),
    (110.25, "step", {"phase": "train", "epoch": 1, "tokens": 80}),
    (112.0, "notice", {"message": "Something."}),
    (112.25, "evaluated", {}),
    (112.5, "step", {"phase": "train", "epoch": 2, "tokens": 130}),
    (113.0, "step", {"phase": "train", "epoch": 2, "tokens": 170}),
    (113.5, "saved", {}),
    (
        114.0,
        "result",
        {"seconds": 12.5, "documents": 3, "tokens": 90, "passed": True, "allocator_peak_bytes": 2**30}
        | {"heldout_loss_before": 2.0, "heldout_loss_after": 1.0}
        | {"phases": {"train": 12.0, "samples": 0.25, "saving": 0.25}},
    ),
)


def test_each_part_gets_the_time_before_its_events_without_captures():
    found = end_to_end.split(100.0, ARRIVALS, 114.25)
    assert found == {
        "import": 1.5,
        "load": 2.5,
        "texts": 0.5,
        "attach": 1.5,
        "capture": 2.5,
        "steps": 1.0 + 0.25 + 0.25 + 0.5,
        "evaluation": 0.5 + 2.0,
        "save": 0.5,
        "exit": 0.75,
    }
    assert sum(found.values()) == 14.25


def test_the_median_step_is_within_an_epoch_and_tokens_count_once():
    found = end_to_end.figures(ARRIVALS)
    assert found["median_step_ms"] == 375  # of 250 and 500; the evaluation between the epochs is in neither
    assert (found["steps_done"], found["tokens_trained"], found["graphs"]) == (4, 170, 2)
    assert (found["parameters"], found["notices"], found["peak_gib"]) == (7, "Something.", 1)
    assert [found[f"save: {phase}"] for phase in end_to_end.WITHIN_SAVE] == [0.25, 0, 0, 0.25]


@pytest.mark.slow
def test_a_tiny_run_is_split(model_folder, tmp_path, warm):
    files = sorted(write_notes(tmp_path / "notes", make_sentences(24, words=60)).iterdir())
    (row,) = end_to_end.measure(24, files, model_folder, tmp_path, "cpu")
    assert row["triton_cache"] == "empty"
    for part in end_to_end.PARTS:
        assert row[part] == 0 if part == "capture" else row[part] > 0, part
    assert row["documents"] == 24
    assert 0 < row["median_step_ms"] < 1e3 * row["steps"]
    assert row["tokens_trained"] > 0


def test_a_command_that_fails_is_not_timed():
    with pytest.raises(RuntimeError, match=r"failed with exit code 5: It broke\."):
        end_to_end.run_timed([sys.executable, "-c", "import sys; print('It broke.', file=sys.stderr); sys.exit(5)"], {})


def test_too_few_notes_are_refused(notes_folder, capsys):
    with pytest.raises(SystemExit):
        end_to_end.main(["--notes", str(notes_folder)])
    assert "has 24 text files, expected 1000; give --notes or --sizes" in capsys.readouterr().err
