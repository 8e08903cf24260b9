"""The files report.json and samples.json of a version: how it was trained and tested, for its page.

report.json has counts and figures only. samples.json has words and names of the user's; it is there only if the user
asked to keep samples. Versions that were saved before have neither file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.basics.files import NewerFormat, parse_dataclass, read_json
from sebp_edge.errors import AdapterError
from sebp_edge.events import finite
from sebp_edge.values.answers import Answered
from sebp_edge.values.documents import LeftOut

REPORT, SAMPLES = "report.json", "samples.json"
_FORMAT = 1


@dataclass(frozen=True)
class TestLoss:
    """A mean loss on test documents, without boilerplate lines, in nats per token.

    Attributes:
        lowest, highest: a 95 % interval over clusters of documents; None with fewer than two.
        documents, tokens: on how many documents and tokens.
    """

    __test__ = False  # pytest would collect it

    loss: float | None
    lowest: float | None
    highest: float | None
    documents: int
    tokens: int


@dataclass(frozen=True)
class Gains:
    """By what share the loss fell, and the lower bound of that with 95 % confidence, over earlier versions in all
    decisions of an adapter together.

    Attributes:
        over_base, over_base_at_least: against the base model; None if it was not judged.
        over_active, over_active_at_least: against the version that was active before, on the documents that neither has
            been trained on; None if the two were not compared.
        over_best, over_best_at_least: the same against the best version so far; None in older reports, too.
        margin, tolerance: what the gate asks for: `over_base_at_least` of the first or more, and the other lower bounds
            of minus the second or more.
        not_comparable: why the two versions were not compared; empty if they were, or if there was none before.
    """

    over_base: float | None
    over_base_at_least: float | None
    over_active: float | None
    over_active_at_least: float | None
    margin: float
    tolerance: float
    not_comparable: str
    over_best: float | None = None
    over_best_at_least: float | None = None


@dataclass(frozen=True)
class Tested:
    """What the gate has seen.

    Attributes:
        base, active, adapted: the losses of the base model, of the version that was active before (None if there was
            none to compare with), and of this version's judged states.
        boilerplate_base, boilerplate_adapted: the losses on boilerplate lines; None if there are none.
        refit_loss: the loss on the validation documents after the last training, which has seen them; None without it.
        boilerplate_share: the share of the tokens that is in boilerplate lines; None if not known.
    """

    base: TestLoss
    active: TestLoss | None
    adapted: TestLoss
    gains: Gains
    boilerplate_base: float | None
    boilerplate_adapted: float | None
    refit_loss: float | None
    boilerplate_share: float | None = None


@dataclass(frozen=True)
class Curve:
    """The losses of one training, in nats per token.

    Attributes:
        phase: "train", "fold 1" and so on, or "all documents".
        best_epoch: the epoch of the state that was used; 0 is the state before training.
        steps: the last step of each mean.
        losses: means of the loss over the steps since the one before.
        evaluated_after: the number of steps before each evaluation.
        validation: the losses on the validation documents.
    """

    phase: str
    best_epoch: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    evaluated_after: tuple[int, ...]
    validation: tuple[float, ...]


@dataclass(frozen=True)
class Texts:
    """What was read.

    Attributes:
        documents, examples, tokens: how many of each were used.
        splits: the number of documents of each split: "train", "validation" and "test", or "fold 1" and so on.
        left_out: how many files, records or documents were left out, by reason.
    """

    documents: int
    examples: int
    tokens: int
    splits: dict[str, int]
    left_out: dict[str, int]


@dataclass(frozen=True)
class RowCounts:
    """The rows of all examples, of one epoch.

    Attributes:
        context_length: to which padded examples are padded.
        padded: rows, if all examples are padded to it.
        tokens: rows that are not padding.
        active: rows with gradient.
        loss: rows whose label has a loss.
        padding_in_forward: whether the forward pass computed the padding, because the model could not be hoisted; None
            if not known.
    """

    context_length: int
    padded: int
    tokens: int
    active: int
    loss: int
    padding_in_forward: bool | None

    @property
    def padding_share(self) -> float:
        """The share of padding if all examples are padded to the context length."""
        return 1 - self.tokens / max(1, self.padded)


@dataclass(frozen=True)
class Cost:
    """Memory in bytes, and time.

    Attributes:
        device: "cuda", "mps" or "cpu".
        budget: how much memory the process was allowed to use; None without a budget.
        predicted: the peak that the plan predicted; None without a budget.
        peak: the process's peak: GPU memory, with all that is outside torch's allocator, or host memory on the CPU.
        allocator_peak: the part of it that is tensors on the GPU; None on the CPU.
        seconds: from the first step's preparation to the end, evaluations included.
        training_seconds: of it, the steps.
        tokens_per_second: trained tokens per second of the steps, without padding; None before the first step.
    """

    device: str
    budget: int | None
    predicted: int | None
    peak: int
    allocator_peak: int | None
    seconds: float
    training_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class CopiedRun:
    """A training document that is repeated word for word: tokens of the longest run, adapted and by the base model."""

    run: int
    base_run: int


@dataclass(frozen=True)
class LearntOn:
    """What a version learnt on top of another one, in numbers of documents.

    Attributes:
        version: the version that it learnt on from.
        new, changed: those that it learnt; a changed document is related to one that the other version knew.
        replayed: those that it learnt again, against forgetting.
        gone: those that are gone, but still known.
    """

    version: int
    new: int
    changed: int
    replayed: int
    gone: int


@dataclass(frozen=True)
class TrainingReport:
    """How a version was trained and tested; counts and figures only.

    Attributes:
        tested: None if it was not tested.
        curves: one for each training.
        copies: training documents that it repeats; None if this was not examined, because the call was stopped.
        expectation: what to expect of it, in words; empty if the call was stopped.
        concerns: what makes a gain on these texts meaningless, a sentence each.
        learnt_on: what it learnt on top of another version; None if it learnt all documents, and in older reports.
    """

    tested: Tested | None
    curves: tuple[Curve, ...]
    texts: Texts
    rows: RowCounts
    cost: Cost
    copies: tuple[CopiedRun, ...] | None
    expectation: str
    concerns: tuple[str, ...]
    learnt_on: LearntOn | None = None
    format: int = _FORMAT


@dataclass(frozen=True)
class Sample:
    """How a test document continues.

    Attributes:
        document: the source of the document.
        beginning: the first words of a text, a prompt, or the message that is answered.
        base: the base model's continuation.
        before: that of the version that was active before; None if there was none.
        after: that of the new version.
    """

    document: str
    beginning: str
    base: str
    before: str | None
    after: str


@dataclass(frozen=True)
class KeptSamples:
    """Words and names of the user's, which are saved only if the user asked to keep them.

    Attributes:
        left_out: what was left out, by name.
        copies: the names of the documents in `TrainingReport.copies`, in that order.
        answers: those of the quiz; empty without a quiz.
    """

    samples: tuple[Sample, ...]
    left_out: tuple[LeftOut, ...]
    copies: tuple[str, ...]
    answers: tuple[Answered, ...] = ()
    format: int = _FORMAT


def write_report(folder: Path, report: TrainingReport, samples: KeptSamples | None) -> None:
    """Writes the files into the folder of a new version.

    Raises:
        OSError: they cannot be written.
    """
    for name, content in ((REPORT, report), (SAMPLES, samples)):
        if content is not None:
            text = json.dumps(finite(asdict(content)), allow_nan=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def read_report(folder: Path) -> TrainingReport | None:
    """Reads report.json of a version; returns None if it has none.

    Raises:
        AdapterError: it is damaged, cannot be read, or was written by a newer sebp-edge.
    """
    return _read(folder / REPORT, TrainingReport)


def read_samples(folder: Path) -> KeptSamples | None:
    """Reads samples.json of a version; returns None if it has none.

    Raises:
        AdapterError: see `read_report`.
    """
    return _read(folder / SAMPLES, KeptSamples)


def _read(path: Path, kind: type):
    try:
        return parse_dataclass(read_json(path), kind)
    except NewerFormat as newer:
        raise AdapterError(
            f"{str(path)!r} was written by a newer sebp-edge, in format {newer}; this one reads format {_FORMAT}. "
            "Upgrade sebp-edge."
        ) from newer
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
        raise AdapterError(
            f"{str(path)!r} cannot be read{reason}; restore the file, or delete it to do without it."
        ) from error
