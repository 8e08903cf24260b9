"""Events of an adaptation, as small frozen dataclasses, and the sinks that receive them.

A sink is any callable that takes one event. `Personalizer(on_event=sink)` calls it with each event, in order and in the
training thread. An error raised in a sink ends the run with that error; `Personalizer.stop` ends it from any thread.
Events hold counts, losses and names, never texts.

`Event.to_dict` is the message that `--json` writes; `message` makes the same of a result or an error.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, TextIO

__all__ = [
    "PROTOCOL",
    "AdapterSaved",
    "Evaluated",
    "Event",
    "ExampleAnalyzed",
    "ExamplesEvaluated",
    "GraphCaptured",
    "JobProgress",
    "JobStarted",
    "JsonLines",
    "LearningOn",
    "MemoryPlanned",
    "MemoryPressure",
    "MemoryProbed",
    "MemoryRanOut",
    "ModelLoaded",
    "NameInUse",
    "Notice",
    "PreparationProgress",
    "Sink",
    "Started",
    "StepDone",
    "TensorWritten",
    "TextsRead",
    "TrainingStarted",
    "Waiting",
    "message",
    "new_job",
    "silent",
]

# The version of the messages. Within one version, keys and events are only added.
PROTOCOL = 1


def new_job() -> str:
    """Returns a fresh id of a job: 12 hexadecimal digits."""
    return os.urandom(6).hex()


def now() -> float:
    """Returns the time in UTC, in seconds since 1970, to milliseconds: a number that any language can subtract."""
    return round(time.time(), 3)


def message(record: dict, job: str) -> dict:
    """Returns a result or an error as a message: with the protocol's version, the time and the job's id."""
    return {"v": PROTOCOL, "time": now(), "job": job, **record}


def finite(value):
    """Returns values of JSON with null for NaN and infinity, which JSON lacks, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Event:
    """Base class of all events; `event` is the event's name in JSON.

    Attributes:
        time: when it happened, in seconds since 1970 (UTC).
        job: the id of the call that it is from; empty outside of a call.
    """

    event: ClassVar[str]
    time: float = field(default_factory=now, kw_only=True, compare=False, repr=False)
    job: str = field(default="", kw_only=True, compare=False, repr=False)

    def of_job(self, job: str) -> "Event":
        """Returns the event as one of a job."""
        return replace(self, job=job)

    def to_dict(self) -> dict:
        """Returns the event as a message of JSON-ready values."""
        values = asdict(self)
        return {"v": PROTOCOL, "time": values.pop("time"), "job": values.pop("job"), "event": self.event, **values}


Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Started(Event):
    """A command has started; the first line of `--json`.

    Attributes:
        version: the version of sebp-edge.
        schema_hash: the SHA-256 hash of the JSON Schema of its messages, in hexadecimal digits.
    """

    event: ClassVar[str] = "started"
    version: str
    schema_hash: str


@dataclass(frozen=True)
class JobProgress(Event):
    """How far the whole call is, sent at the beginning of each phase, and at least every 2 s of work.

    Attributes:
        phase: what is done now: "reading", "loading", "training" and so on.
        fraction: the share of the whole that is done, from 0 to 1; never falls, and is 1 only at the end.
        seconds_left: the estimate for all that is left; None until the amount of work is known.
    """

    event: ClassVar[str] = "progress"
    phase: str
    fraction: float
    seconds_left: float | None


@dataclass(frozen=True)
class Notice(Event):
    """Something the user should know, in one sentence."""

    event: ClassVar[str] = "notice"
    message: str


@dataclass(frozen=True)
class JobStarted(Event):
    """A training that can be paused and resumed begins, or goes on; the first event of `adapt` and `resume`.

    Attributes:
        id: the id of its job in the store.
        progress: how much of it is done, from 0 to 1, as `JobProgress` tells it.
    """

    event: ClassVar[str] = "job_started"
    id: str
    progress: float


@dataclass(frozen=True)
class Waiting(Event):
    """A training waits for other programs, or for mains power; it goes on by itself.

    Until it does, the phase of the job is "waiting".

    Attributes:
        waits_for: "power", "memory" or "gpu".
        holds_memory: whether the model stays in memory; otherwise the training begins again at its checkpoint.
        message: why, in one sentence.
    """

    event: ClassVar[str] = "waiting"
    waits_for: str
    holds_memory: bool
    message: str


@dataclass(frozen=True)
class NameInUse(Event):
    """The name has an adapter of other texts, another base model or another recipe.

    The adaptation goes on as its next version, unless the sink raises an error.

    Attributes:
        name, version: the adapter, and its active version.
        differs: in what they differ: "texts", "model", "recipe".
        proposal: a name that is not in use.
        message: all of it, in sentences.
    """

    event: ClassVar[str] = "name_in_use"
    name: str
    version: int
    differs: tuple[str, ...]
    proposal: str
    message: str


@dataclass(frozen=True)
class MemoryPlanned(Event):
    """A plan that fits the memory budget was chosen. Memory is in bytes.

    Attributes:
        method: "lora" or "full".
        description: the chosen memory options, in words.
        max_rows: the maximum rows of a micro-batch.
        budget: the memory budget.
        peak: the predicted peak memory of the process.
        seconds: the estimated duration of the training.
        footprint: the predicted memory by purpose.
    """

    event: ClassVar[str] = "memory_planned"
    method: str
    description: str
    max_rows: int
    budget: int
    peak: int
    seconds: float
    footprint: dict[str, int]


@dataclass(frozen=True)
class MemoryProbed(Event):
    """A dry run of the largest micro-batch fits into memory; it changed nothing. Memory is in bytes.

    Attributes:
        rows: the rows of that micro-batch, filler included.
        peak: the process's peak memory so far: GPU memory with CUDA's context, or host memory on the CPU.
        allocator_peak: the part of it that is tensors on the GPU; None on the CPU.
        predicted: the plan's peak; None without a memory budget.
    """

    event: ClassVar[str] = "memory_probed"
    rows: int
    peak: int
    allocator_peak: int | None
    predicted: int | None


@dataclass(frozen=True)
class ModelLoaded(Event):
    """The base model is in memory. `dtype` is "nf4" if its linear layers are in 4 bits."""

    event: ClassVar[str] = "model_loaded"
    model: str
    parameters: int
    device: str
    dtype: str


@dataclass(frozen=True)
class PreparationProgress(Event):
    """The progress of the preparation: `done` of `total`, several times a second.

    `stage` is "reading" or "downloading" (in bytes), "comparing" or "tokenising", or "planning" (in epochs laid out).
    """

    event: ClassVar[str] = "preparing"
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class TextsRead(Event):
    """The texts were read and cut into examples. `left_out` holds `{"source", "reason"}` records."""

    event: ClassVar[str] = "texts_read"
    documents: int
    examples: int
    tokens: int
    padding_share: float
    left_out: tuple[dict, ...]


@dataclass(frozen=True)
class LearningOn(Event):
    """The adaptation learns on from the active version. All but `version` are numbers of documents.

    Attributes:
        version: the active version.
        new, changed: those that it does not know; a changed document is related to one that it knows.
        unchanged: those that it knows.
        replayed: those of the unchanged ones that are trained on again.
        gone: those that are gone, but that the new version still knows.
    """

    event: ClassVar[str] = "learning_on"
    version: int
    new: int
    changed: int
    unchanged: int
    replayed: int
    gone: int

    @property
    def summary(self) -> str:
        """What is trained on."""
        return (
            f"Learning on from version {self.version}: {self.new:,} new and {self.changed:,} changed documents, and "
            f"{self.replayed:,} of the other {self.unchanged:,} again."
        )


@dataclass(frozen=True)
class TrainingStarted(Event):
    """A training begins. `phase` is "train", "fold 1" and so on, or "all documents".

    Attributes:
        train_documents, validation_documents, test_documents: the sizes of the train, validation and test splits.
    """

    event: ClassVar[str] = "training_started"
    phase: str
    epochs: int
    train_documents: int
    validation_documents: int
    test_documents: int


@dataclass(frozen=True)
class GraphCaptured(Event):
    """A part of the training was compiled and captured as a CUDA graph.

    `part` is "update", or "gradients" or "losses" of a bucket.
    """

    event: ClassVar[str] = "graph_captured"
    part: str
    seconds: float


@dataclass(frozen=True)
class MemoryRanOut(Event):
    """A micro-batch ran out of memory. It is run again in smaller ones, and all later ones are smaller too.

    `max_rows` is the new maximum number of tokens in a micro-batch; in padded batches, padding counts.
    """

    event: ClassVar[str] = "memory_ran_out"
    max_rows_before: int
    max_rows: int


@dataclass(frozen=True)
class MemoryPressure(Event):
    """Free memory is too low, mostly because of other programs; micro-batches are smaller from now on.

    `shortfall` is in bytes. If `max_rows` is unchanged, micro-batches cannot be smaller: they are single examples
    already, or all weights are updated within the backward pass, where each step is one micro-batch.
    """

    event: ClassVar[str] = "memory_pressure"
    shortfall: int
    max_rows_before: int
    max_rows: int


@dataclass(frozen=True)
class StepDone(Event):
    """One step was done. `loss` is in nats per loss token; `seconds_left` covers the steps of this training only."""

    event: ClassVar[str] = "step"
    phase: str
    step: int
    steps: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class ExamplesEvaluated(Event):
    """The progress of an evaluation: `done` of `examples`."""

    event: ClassVar[str] = "examples_evaluated"
    done: int
    examples: int


@dataclass(frozen=True)
class Evaluated(Event):
    """A loss was evaluated, in nats per token; `best` says whether it is the best so far.

    `split` is "validation" or "test", which are held out. It is also "train", once: the loss on the validation
    documents after the last training, on all documents, which has seen them.
    """

    event: ClassVar[str] = "evaluated"
    phase: str
    split: str
    epoch: int
    loss: float
    best: bool


@dataclass(frozen=True)
class ExampleAnalyzed(Event):
    """The gradients of an example were analyzed: `example` of `examples`, which counts each example once per loss."""

    event: ClassVar[str] = "example_analyzed"
    example: int
    examples: int


@dataclass(frozen=True)
class TensorWritten(Event):
    """A tensor of an export was written: `tensor` of `tensors`."""

    event: ClassVar[str] = "tensor_written"
    tensor: int
    tensors: int


@dataclass(frozen=True)
class AdapterSaved(Event):
    """An adapter was saved completely."""

    event: ClassVar[str] = "saved"
    name: str | None
    version: int | None
    adapter_path: str
    active: bool


def silent(event: Event) -> None:
    """A sink that does nothing."""


class JsonLines:
    """A sink that writes each event as a message, one JSON object per line.

    Args:
        job: the id that all messages get; by default events keep theirs.
    """

    def __init__(self, stream: TextIO, job: str | None = None):
        self.stream, self.job = stream, job

    def __call__(self, event: Event) -> None:
        self.write(event)

    def write(self, record: Event | dict) -> None:
        """Writes an event, or a result or an error, and flushes, so that the reading program sees it at once.

        Writes only ASCII, since a pipe may not be UTF-8 and file names may not be valid text; writes null for NaN and
        infinity, which JSON lacks.
        """
        if isinstance(record, Event):
            record = (record if self.job is None else record.of_job(self.job)).to_dict()
        else:
            record = message(record, self.job or "")
        self.stream.write(json.dumps(finite(record)) + "\n")
        self.stream.flush()
