"""What happens during an adaptation, as it happens: small frozen dataclasses, and the sinks that take them.

A sink is any callable that takes one event. `Personalizer(on_event=sink)` hands it every event, in order and in the
thread that trains; an app that raises in its sink ends the run with its own error, and `Personalizer.stop` ends it from
any thread. Events hold counts, losses and names, never texts.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, TextIO


@dataclass(frozen=True)
class Event:
    """Base of all events; `event` is its name in JSON."""

    event: ClassVar[str]

    def to_dict(self) -> dict:
        """The event as JSON-ready values, its name first."""
        return {"event": self.event, **asdict(self)}


Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Notice(Event):
    """Something the user should know, in one sentence."""

    event: ClassVar[str] = "notice"
    message: str


@dataclass(frozen=True)
class MemoryPlanned(Event):
    """A way to train was chosen that fits the memory budget. Memory is in bytes; `parts` says what it is for.

    `how` says in words what was chosen; `max_rows` is the most rows that one micro-batch may have; `seconds` is about
    how long the training takes.
    """

    event: ClassVar[str] = "memory_planned"
    method: str
    how: str
    max_rows: int
    budget: int
    peak: int
    seconds: float
    parts: dict[str, int]


@dataclass(frozen=True)
class MemoryProbed(Event):
    """The fullest micro-batch has run once and fits; nothing was changed by it. Memory is in bytes.

    Attributes:
        rows: what that micro-batch has, filler included.
        peak: what the process held at most so far: of a GPU with CUDA's context, of the host's memory on the CPU.
        allocator_peak: of that, tensors on the GPU; None on the CPU.
        predicted: the plan's peak, None without a memory budget.
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
class TextsRead(Event):
    """The texts are read and cut into examples. `left_out` holds `{"source", "reason"}` records."""

    event: ClassVar[str] = "texts_read"
    documents: int
    examples: int
    tokens: int
    padding_share: float
    left_out: tuple[dict, ...]


@dataclass(frozen=True)
class TrainingPlanned(Event):
    """A training begins. `phase` is "train", "fold 1" and so on, or "all documents"."""

    event: ClassVar[str] = "training_planned"
    phase: str
    epochs: int
    train_documents: int
    select_documents: int
    judge_documents: int


@dataclass(frozen=True)
class GraphCaptured(Event):
    """A part of the training is compiled and captured on a GPU: an "update", or "gradients" or "losses" of a bucket."""

    event: ClassVar[str] = "graph_captured"
    part: str
    seconds: float


@dataclass(frozen=True)
class MemoryRanOut(Event):
    """A micro-batch did not fit into memory. It is run again in smaller ones, and all that follow are smaller too.

    `max_rows` is the most tokens that a micro-batch may have now (on padded batches, padding counts).
    """

    event: ClassVar[str] = "memory_ran_out"
    max_rows_before: int
    max_rows: int


@dataclass(frozen=True)
class MemorySqueezed(Event):
    """Memory has become short, mostly since other programs took it; micro-batches are smaller from now on.

    `missing` says by how many bytes. Where `max_rows` is not less than before, nothing can be cut: single examples run
    already, or all weights are updated within the backward pass, and a step is one micro-batch.
    """

    event: ClassVar[str] = "memory_squeezed"
    missing: int
    max_rows_before: int
    max_rows: int


@dataclass(frozen=True)
class StepDone(Event):
    """One optimizer update. `loss` in nats per loss token; `seconds_left` covers this phase."""

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
    """An evaluation, before, between or after the steps, has come so far: `done` of `examples`."""

    event: ClassVar[str] = "examples_evaluated"
    done: int
    examples: int


@dataclass(frozen=True)
class Evaluated(Event):
    """A loss in nats per token; `best` says whether it is the best so far.

    `split` is "select" or "judge", whose documents are held out; with few documents also "train", once: the loss of the
    last training on all of them.
    """

    event: ClassVar[str] = "evaluated"
    phase: str
    split: str
    epoch: int
    loss: float
    best: bool


@dataclass(frozen=True)
class ExampleAnalyzed(Event):
    """The gradients of one example were looked at; `examples` is how many will be, once for each of the losses."""

    event: ClassVar[str] = "example_analyzed"
    example: int
    examples: int


@dataclass(frozen=True)
class AdapterSaved(Event):
    """An adapter is on disk, whole."""

    event: ClassVar[str] = "saved"
    name: str | None
    version: int | None
    adapter_path: str
    active: bool


def silent(event: Event) -> None:
    """The sink that does nothing."""


class JsonLines:
    """The sink that writes one JSON object a line."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __call__(self, event: Event) -> None:
        self.write(event.to_dict())

    def write(self, record: dict) -> None:
        """Writes one record and flushes, so that a reading program sees it at once.

        Only ASCII: a pipe need not be UTF-8, and names of files on disk need not be text. JSON has no NaN: null it is.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.stream.write(json.dumps(finite) + "\n")
        self.stream.flush()
