"""What a training found, as one value: `TrainingFacts`.

Each fact is a field of the class of the file that keeps it: `TrainingFigures` of sebp_edge.json, `ReportedFacts` of
report.json. The record, the report and the result take them by the names of their fields: see `facts_for`.
"""

from dataclasses import dataclass, fields
from typing import TypeVar

from sebp_edge.values.answers import Answered, QuizFigures
from sebp_edge.values.documents import LeftOut
from sebp_edge.values.probe_figures import ProbeFigures, describe
from sebp_edge.values.word_figures import WordFigures

Kind = TypeVar("Kind")


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
class Copied:
    """A training document that the adapter repeats word for word.

    Attributes:
        document: the source of the document.
        run: the longest run of tokens that its own beginnings bring back, without boilerplate.
        base_run: the same with the base model alone.
    """

    document: str
    run: int
    base_run: int

    @property
    def is_learnt(self) -> bool:
        """Whether to warn: the run is more than twice the base model's."""
        return self.run > 2 * self.base_run


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


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """Counts, losses and settings, which the record of an adapter keeps.

    Attributes:
        documents, examples, tokens: how many of each were used.
        heldout_loss_before, heldout_loss_after: the test loss in nats per token, of the base model and of the judged
            states, without boilerplate lines; None if the adapter was not judged.
        seed: the random seed of the adaptation.
        verdict: what the gate said: "better", "no gain", "worse than active", "worse than best", "not comparable",
            "not judged", "refit failed" or "forgets"; None if the training was stopped before.
        trained_on_all: whether it was trained on all documents after the gate had judged it, which is not judged by
            itself; None in records of older versions.
        general_loss_before, general_loss_after: the loss on the bundled general text in nats per token, of the base
            model and the adapter; None if it was not measured.
        language, facts: how many bundled items each knows: sentences beside the same with a mistake, and answers to
            general questions beside wrong ones; None if it was not measured, if the model's chat template shows none,
            and in older records.
        chat: whether prompts are rendered with the model's chat template, as most of the documents were; None in
            records of older versions, in which the recipe's chat_template decides.
        explanation: why the gate found it better or not, in words; None if it was not judged, and in older records.
        compared_with: the version that was active before; None if there was none.
        compared_loss_before, compared_loss_after: the losses of that version's judged states and of this one's, on the
            test documents that neither has been trained on; None if the two were not compared.
        best_before: the best version so far that it could be compared with, often the active one; None if there was
            none.
        best_loss_before, best_loss_after: the losses of that version's judged states and of this one's, as above.
        is_best: whether it is the best version from then on, which takes that it is surely no worse; None in older
            records.
        refused: how many versions of its name the gate had refused beside an earlier one, this one included: the more,
            the surer a new one has to be; None in older records.
        learnt_on_from: the version that it learnt on from; None if it began at the base model, and in older records.
        packages: the versions of Python and of the packages that compute; None in older records.
        threads: how many threads computed on the CPU; None on a GPU, and in older records.
        quiz: what a quiz showed, which decides then; None without one.
        words: what ghost text would have done in the test documents, before and after; None if that was not counted,
            and in older records.
    """

    documents: int
    examples: int
    tokens: int
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None
    seed: int
    verdict: str | None = None
    trained_on_all: bool | None = None
    general_loss_before: float | None = None
    general_loss_after: float | None = None
    language: ProbeFigures | None = None
    facts: ProbeFigures | None = None
    chat: bool | None = None
    explanation: str | None = None
    compared_with: int | None = None
    compared_loss_before: float | None = None
    compared_loss_after: float | None = None
    best_before: int | None = None
    best_loss_before: float | None = None
    best_loss_after: float | None = None
    is_best: bool | None = None
    refused: int | None = None
    learnt_on_from: int | None = None
    packages: dict[str, str] | None = None
    threads: int | None = None
    quiz: QuizFigures | None = None
    words: WordFigures | None = None

    @property
    def passed(self) -> bool:
        """Whether the gate found the adapter better."""
        return self.verdict == "better"

    @property
    def kept(self) -> str:
        """How much of what the model could before is left, in words; empty if that is not known."""
        return describe(self.language, self.facts)


@dataclass(frozen=True, kw_only=True)
class ReportedFacts:
    """How a version was trained and tested; counts and figures only.

    Attributes:
        tested: None if it was not tested.
        curves: one for each training.
        copies: training documents that it repeats; None if this was not examined, because the call was stopped.
        expectation: what to expect of it, in words; empty if the call was stopped.
        concerns: what makes a gain on these texts meaningless, a sentence each; the gate then judges nothing.
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


@dataclass(frozen=True, kw_only=True)
class TrainingFacts(TrainingFigures, ReportedFacts):
    """What a training found.

    Attributes:
        copies: documents that the adapter repeats word for word and the base model does not, longest first.
        samples: continuations of test documents by the base model, the version before and the judged state; they
            contain the user's text.
        left_out: what was not used, with the reasons.
        answers: the quiz's questions about notes, and the adapter's answers; empty without a quiz.
        refit_loss: the loss on the validation documents after the training on all documents, which has seen them; None
            without it.
        gains: those of `tested`, also if it was not judged; None if the training was stopped before.
    """

    tested: Tested | None = None
    copies: tuple[Copied, ...] | None = None
    expectation: str = ""
    samples: tuple[Sample, ...] = ()
    left_out: tuple[LeftOut, ...]
    answers: tuple[Answered, ...] = ()
    refit_loss: float | None = None
    gains: Gains | None = None


def facts_for(kind: type[Kind], facts: TrainingFacts, **others) -> Kind:
    """Returns the dataclass of a file with the facts that it has fields for, and other values."""
    shared = {field.name: getattr(facts, field.name) for field in fields(kind) if hasattr(facts, field.name)}
    return kind(**shared | others)
