"""Checkpoints of a run: how far its trainings are, in a few files that a killed process cannot leave half-written.

    checkpoint.json             how far the run is, and the names and checksums of the other files; replaced atomically
    <number>.safetensors        tensors: the best state of a training, or what the learner goes on from

A checkpoint is complete once checkpoint.json names its files, which are on the disk then; those of the one before are
deleted afterwards, so that only a failing disk damages it. Another one would double what a training of all weights
needs of the disk. It contains losses and weights; no text, no tokens, and no name of a document.
"""

import dataclasses
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from safetensors import safe_open
from torch import Tensor

from sebp_edge.basics.files import flush, read_checked_json, storage_errors, write_checked_json
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.basics.weights import write_tensors
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.recovery import LearnerState
from sebp_edge.errors import JobError, StorageError
from sebp_edge.events import Notice, Sink

FILE = "checkpoint.json"
_FORMAT = 3
# The size limit of checkpoint.json, in bytes; a document takes 200.
_MAX_BYTES = 2**28
# The share of the time that writing takes at most.
SHARE = 0.01
# How fast a disk is assumed to be until a checkpoint is written, and the time of a small file.
_BYTES_PER_SECOND, _LEAST_SECONDS = 100e6, 0.02
# After a failure.
_RETRY_SECONDS = 60
# In bytes.
_PIECE = 2**22


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    seconds: float
    progress: list[TrainingProgress]
    learner: LearnerState | None = None  # what the last training goes on from; None unless it runs
    share: float = 0.0  # how much of the whole call is done, from 0 to 1

    def renumbered(self, number_of: Mapping[int, int]) -> "RunState":
        """Returns the state without the losses of documents that have no new number."""

        def own(losses: HeldOutLoss | None) -> HeldOutLoss | None:
            return None if losses is None else losses.renumbered(number_of)

        progress = []
        for each in self.progress:
            best = own(each.best_validation)
            changes = {"before": own(each.before), "after": own(each.after), "best_validation": best}
            progress.append(dataclasses.replace(each, **changes, best_loss=best.mean if best else each.best_loss))
        return dataclasses.replace(self, progress=progress)


@dataclass
class CheckpointFiles:
    """The files of a run's checkpoint in a folder, which exists."""

    folder: Path
    # What each checkpoint says besides the run's state, as JSON-ready values.
    values: dict = field(default_factory=dict)
    _number: int = 0
    # What the checkpoint has, by what it is: a stamp of its content, and its entry in checkpoint.json.
    _written: dict[str, tuple[tuple, dict]] = field(default_factory=dict)

    def write(self, state: RunState) -> None:
        """Replaces the checkpoint.

        Raises:
            StorageError: it could not be written; the one before is still there.
        """
        learners = {} if state.learner is None else {len(state.progress) - 1: state.learner}
        values = self.values | {
            "format": _FORMAT,
            "share": state.share,
            "seconds": state.seconds,
            "progress": [asdict(dataclasses.replace(each, best_state=[])) for each in state.progress],
            "learners": {number: each._replace(tensors=[])._asdict() for number, each in learners.items()},
        }
        with storage_errors("The checkpoint could not be written to", self.folder, ""):
            written = {}
            for number, each in enumerate(state.progress):
                name, stamp = f"best {number}", _stamp(each)
                is_written = name in self._written and self._written[name][0] == stamp
                written[name] = self._written[name] if is_written else (stamp, self._write_part(each.best_state))
            for number, each in learners.items():
                written[f"learner {number}"] = (), self._write_part(each.tensors)
            files = {name: entry for name, (_, entry) in written.items()}
            flush(self.folder)
            write_checked_json(self.folder / FILE, values | {"files": files})
            self._written = written
            self._delete_others()

    def read(self) -> RunState | None:
        """Returns the state in the checkpoint; None if there is none."""
        if not (self.folder / FILE).exists():
            return None
        try:
            values = read_checked_json(self.folder / FILE, _MAX_BYTES)
            if values["format"] != _FORMAT:
                raise ValueError("format")
            tensors = {name: self._read_part(entry) for name, entry in values["files"].items()}
            progress = [_progress(each, tensors[f"best {n}"]) for n, each in enumerate(values["progress"])]
            learner, last = None, str(len(progress) - 1)
            if values["learners"].keys() - {last}:
                raise ValueError("trainings that ran at once")
            if values["learners"]:
                learner = LearnerState(**values["learners"][last] | {"tensors": tensors[f"learner {last}"]})
            state = RunState(values["seconds"], progress, learner, values["share"])
        except Exception as error:  # whatever safetensors raises, too
            raise JobError(
                f"The checkpoint in {str(self.folder)!r} is damaged, or was written by another sebp-edge; start over "
                'with --changed again (changed="again").'
            ) from error
        self.values = {name: value for name, value in values.items() if name not in _OWN}
        self._number = 1 + max((int(Path(entry["file"]).stem) for entry in values["files"].values()), default=0)
        self._written = {f"best {n}": (_stamp(each), values["files"][f"best {n}"]) for n, each in enumerate(progress)}
        return state

    def _write_part(self, tensors: Sequence[Tensor]) -> dict:
        """Writes tensors into a file of their own; returns its entry in checkpoint.json."""
        self._number += 1
        path = self.folder / f"{self._number}.safetensors"
        kinds = {str(number): (tensor.dtype, tensor.shape) for number, tensor in enumerate(tensors)}
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            summed = _Summed(file)
            write_tensors(summed, kinds, tensors)
        flush(path)
        return {"file": path.name, "size": summed.size, "crc32": summed.crc32}

    def _read_part(self, entry: dict) -> list[Tensor]:
        path = self.folder / entry["file"]
        summed = _Summed()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                summed.write(piece)
        if (summed.size, summed.crc32) != (entry["size"], entry["crc32"]) or path.parent != self.folder:
            raise ValueError("checksum")
        with safe_open(path, framework="pt") as file:
            # Copied, since the file is deleted by a later checkpoint.
            return [file.get_tensor(str(number)).clone() for number in range(len(file.keys()))]

    def _delete_others(self) -> None:
        """Deletes what the checkpoint does not name; what a killed process has left, too."""
        named = {entry["file"] for _, entry in self._written.values()}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in named:
                path.unlink()


_OWN = {"format", "share", "seconds", "progress", "learners", "files"}


class Checkpointed(Protocol):
    """A run that checkpoints are of."""

    state: RunState | None  # how far it is; None if its checkpoint is to stay as it was read
    is_between_steps: bool  # whether it has a state to write
    is_waited_for: bool  # whether it is to wait between two steps, with a checkpoint


class Checkpoints:
    """Writes the checkpoints of a run while it runs, and one when it is paused.

    Each is written once the time since the last one is so long that writing takes 1 % of it at most.

    Args:
        files: where they are written; None to write none.

    Attributes:
        has_failed: whether the last one could not be written, or none is any more.
    """

    def __init__(self, files: CheckpointFiles | None, signal: StopSignal, sink: Sink, run: Checkpointed):
        self._files, self._signal, self._sink, self._run = files, signal, sink, run
        self._due: float | None = None
        self.has_failed = False

    def due(self) -> bool:
        """Whether the next occasion between two steps is to be used, to write one or to wait."""
        is_time = self._files is not None and self._due is not None and time.perf_counter() >= self._due
        return is_time or self._signal.is_pausing or self._run.is_waited_for

    def begin(self, num_bytes: int) -> None:
        """Begins to write checkpoints of about this size."""
        self._due = time.perf_counter() + (_LEAST_SECONDS + num_bytes / _BYTES_PER_SECOND) / SHARE

    def end(self) -> None:
        """Writes no more: what was trained is saved."""
        self._files, self.has_failed = None, True

    def check(self) -> None:
        """Writes a checkpoint if it is due; ends the call if a stop or a pause was requested.

        Raises:
            StopRequested, PauseRequested: see `StopSignal.check`; a pause is raised only after it was written.
        """
        can_write = self._run.is_between_steps
        if can_write and self._files is not None and self.due():
            self._write()
        self._signal.check(may_pause=can_write)

    def _write(self) -> None:
        begin, state = time.perf_counter(), self._run.state
        if state is None:
            return
        try:
            self._files.write(state)
        except StorageError as error:
            self._go_on_without(error)
            return
        self.has_failed, now = False, time.perf_counter()
        self._due = now + (now - begin) * (1 / SHARE - 1)

    def _go_on_without(self, error: StorageError) -> None:
        is_pausing, self._signal.is_pausing = self._signal.is_pausing, False
        if not self._files.folder.is_dir():  # a document was forgotten, or the adapter removed
            self._files, self._signal.can_pause = None, False
            self._sink(Notice("The job was deleted; its training goes on, and can no longer be resumed."))
        elif is_pausing or not self.has_failed:
            then = "is not paused, and goes on" if is_pausing else "goes on; until there is space, no steps are saved"
            self._sink(Notice(f"{error} The training {then}."))
        self.has_failed, self._due = True, time.perf_counter() + _RETRY_SECONDS


def _stamp(progress: TrainingProgress) -> tuple:
    """Returns what tells the best state of a training from its earlier ones."""
    return progress.phase, progress.best_epoch, len(progress.best_state)


class _Summed:
    """Computes the checksum and the size of what is written to a file."""

    def __init__(self, file: BinaryIO | None = None):
        self._file, self.crc32, self.size = file, 0, 0

    def write(self, data: bytes | memoryview) -> None:
        self.crc32, self.size = zlib.crc32(data, self.crc32), self.size + len(data)
        if self._file is not None:
            self._file.write(data)


def _progress(values: dict, best_state: list[Tensor]) -> TrainingProgress:
    values.pop("last_unsettled_epoch", None)  # of trainings that could prune
    losses = {name: _losses(values[name]) for name in ("best_validation", "before", "after")}
    validations = [tuple(each) for each in values["validations"]]
    return TrainingProgress(**values | losses | {"validations": validations, "best_state": best_state})


def _losses(values: dict | None) -> HeldOutLoss | None:
    if values is None:
        return None
    return HeldOutLoss(**{name: {int(key): each for key, each in part.items()} for name, part in values.items()})
