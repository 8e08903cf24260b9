"""The files of a checkpoint: what is written is read again, and what no training can go on from is refused."""

import json

import pytest
import torch

from sebp_edge.basics.files import write_checked_json
from sebp_edge.engine.training.checkpoint import FILE, CheckpointFiles, RunState
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.recovery import LearnerState
from sebp_edge.errors import JobError


def write(folder):
    """Writes the checkpoint of a run whose second training is running; returns what it says."""
    progress = [TrainingProgress("fold 1", steps=3, is_over=True), TrainingProgress("fold 2", steps=1)]
    CheckpointFiles(folder).write(RunState(1.0, progress, LearnerState([torch.arange(3.0)], 80, 40)))
    return json.loads((folder / FILE).read_text())


def test_the_last_training_goes_on_from_what_was_written(tmp_path):
    assert list(write(tmp_path)["learners"]) == ["1"]
    learner = CheckpointFiles(tmp_path).read().learner
    assert torch.equal(learner.tensors[0], torch.arange(3.0))
    assert learner[1:] == (80, 40)


def test_a_checkpoint_of_a_training_that_could_prune_is_read(tmp_path):
    values = write(tmp_path)
    values["progress"] = [each | {"last_unsettled_epoch": 0} for each in values["progress"]]
    write_checked_json(tmp_path / FILE, {name: value for name, value in values.items() if name != "crc32"})
    assert [each.steps for each in CheckpointFiles(tmp_path).read().progress] == [3, 1]


@pytest.mark.parametrize("running", [("0", "1"), ("0",), ("7",), ("x",)], ids=str)
def test_a_checkpoint_of_trainings_that_ran_at_once_is_refused(tmp_path, running):
    values = write(tmp_path)
    (learner,), entry = values["learners"].values(), values["files"].pop("learner 1")
    values["learners"] = dict.fromkeys(running, learner)
    values["files"] |= {f"learner {number}": entry for number in running}
    write_checked_json(tmp_path / FILE, {name: value for name, value in values.items() if name != "crc32"})
    with pytest.raises(JobError, match="another sebp-edge; start over"):
        CheckpointFiles(tmp_path).read()
