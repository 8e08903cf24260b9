"""Events of an adaptation, as small frozen dataclasses, and the sinks that receive them.

A sink is any callable that takes one event. `Personalizer(on_event=sink)` calls it with each event, in order and in the
training thread. An error raised in a sink ends the run with that error; `Personalizer.stop` ends it from any thread.
Events hold counts, losses and names, never texts.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, TextIO

__all__ = [
    "AdapterSaved",
    "Evaluated",
    "Event",
    "ExampleAnalyzed",
    "ExamplesEvaluated",
    "GraphCaptured",
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
    "StepDone",
    "TensorWritten",
    "TextsRead",
    "TrainingStarted",
    "silent",
]


@dataclass(frozen=True)
class Event:
    """Base class of all events; `event` is the event's name in JSON."""

    event: ClassVar[str]

    def to_dict(self) -> dict:
        """Returns the event as JSON-ready values, its name first."""
        return {"event": self.event, **asdict(self)}


Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Notice(Event):
    """Something the user should know, in one sentence."""

    event: ClassVar[str] = "notice"
    message: str


@dataclass(frozen=True)
class JobStarted(Event):
    """A training that can be paused and resumed begins, or goes on; the first event of `adapt` and `resume`.

    Attributes:
        job: the id of its job.
        progress: how much of its steps is done, from 0 to 1.
    """

    event: ClassVar[str] = "job_started"
    job: str
    progress: float


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

    `stage` is "reading" (in bytes), "comparing" or "tokenising", or "planning" (in epochs laid out).
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
    """A sink that writes one JSON object per line."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __call__(self, event: Event) -> None:
        self.write(event.to_dict())

    def write(self, record: dict) -> None:
        """Writes one record and flushes, so that the reading program sees it at once.

        Writes only ASCII, since a pipe may not be UTF-8 and file names may not be valid text; writes null for NaN and
        infinity, which JSON lacks.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.stream.write(json.dumps(finite) + "\n")
        self.stream.flush()
