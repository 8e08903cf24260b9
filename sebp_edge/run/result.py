"""The result of an adaptation."""

import shlex
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from sebp_edge.basics.units import percent
from sebp_edge.engine.training.gate import TOLERANCE, GateResult, Verdict
from sebp_edge.engine.training.quiz import QuizFigures
from sebp_edge.run.assessment import Copied
from sebp_edge.run.reporting import Report
from sebp_edge.run.saving import describe_activation, has_commands
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.training_report import Sample, Tested
from sebp_edge.values.chats import Author
from sebp_edge.values.documents import LeftOut
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.probe_figures import ProbeFigures, describe
from sebp_edge.values.word_figures import WordFigures

# A higher rise of the loss on general text is warned of. Trainings that harm nothing raise it by up to 6 %.
HIGH_RISE = 0.1


@dataclass(frozen=True)
class Boilerplate:
    """The part of the test documents that is in lines which stand in many documents; losses in nats per token."""

    share_of_tokens: float
    loss_before: float
    loss_after: float


def _read(path: str, missing=None) -> Any:
    """Returns a property that reads a fact where it is; `missing` if there is None on the way."""

    def fact(result):
        for name in path.split("."):
            result = getattr(result, name)
            if result is None:
                return missing
        return result

    return property(fact)


class _Facts:
    """What an `AdaptResult` says, in the order of its JSON."""

    passed: bool = _read("judged.passed")
    active: bool = _read("saved.active")
    overtaken_by: int | None
    verdict: str = _read("report.record.verdict")
    explanation: str = _read("report.record.explanation")
    name: str | None = _read("saved.name")
    version: int | None = _read("saved.version")
    adapter_path: Path = _read("saved.path")
    heldout_loss_before: float | None = _read("report.record.heldout_loss_before")
    heldout_loss_after: float | None = _read("report.record.heldout_loss_after")
    gain: float | None = _read("judged.gain.gain")
    gain_at_least: float | None = _read("judged.gain.lower")
    recipe: str = property(lambda self: self.report.record.recipe["name"])
    margin: float = property(lambda self: self.report.record.recipe["margin"])
    boilerplate: Boilerplate | None = property(lambda self: _boilerplate(self.report.training.tested))
    compared_with: int | None = _read("report.record.compared_with")
    gain_over_active: float | None = _read("judged.gain_over_active.gain")
    gain_over_active_at_least: float | None = _read("judged.gain_over_active.lower")
    tolerance: float = TOLERANCE
    not_comparable: str = _read("judged.life.active.reason", "")
    best_before: int | None = _read("report.record.best_before")
    gain_over_best: float | None = _read("judged.gain_over_best.gain")
    gain_over_best_at_least: float | None = _read("judged.gain_over_best.lower")
    is_best: bool = _read("judged.is_best")
    refused: int = _read("judged.refused")
    trained_on_all: bool = _read("judged.is_refit")
    refit_loss: float | None = _read("judged.refit_loss")
    learnt_on_from: int | None = _read("report.record.learnt_on_from")
    new: int = _read("report.training.learnt_on.new", 0)
    changed: int = _read("report.training.learnt_on.changed", 0)
    gone: int = _read("report.training.learnt_on.gone", 0)
    quiz: QuizFigures | None = _read("judged.quiz.figures")
    words: WordFigures | None = _read("judged.words")
    concerns: tuple[str, ...] = _read("report.training.concerns")
    samples: tuple[Sample, ...] = _read("report.words.samples")
    expectation: str = _read("report.training.expectation")
    general_loss_before: float = _read("report.record.general_loss_before")
    general_loss_after: float = _read("report.record.general_loss_after")
    language: ProbeFigures | None = _read("report.record.language")
    facts: ProbeFigures | None = _read("report.record.facts")
    copies: tuple[Copied, ...] = property(
        lambda self: tuple(
            Copied(document, copy.run, copy.base_run)
            for document, copy in zip(self.report.words.copies, self.report.training.copies, strict=True)
        )
    )
    documents: int = _read("report.training.texts.documents")
    examples: int = _read("report.training.texts.examples")
    tokens: int = _read("report.training.texts.tokens")
    left_out: tuple[LeftOut, ...] = _read("report.words.left_out")
    padding_share: float = _read("report.training.rows.padding_share")
    tokens_per_second: float = _read("report.training.cost.tokens_per_second")
    peak_memory_bytes: int = _read("report.training.cost.peak")
    allocator_peak_bytes: int | None = _read("report.training.cost.allocator_peak")
    predicted_peak_bytes: int | None = _read("report.training.cost.predicted")
    seconds: float = property(lambda self: sum(self.phases.values()))
    phases: dict[str, float]
    command: str = property(lambda self: _command(self))
    activation: str = property(lambda self: _activation(self))
    report_command: str = property(lambda self: _report_command(self))


@dataclass(frozen=True, repr=False)
class AdaptResult(_Facts):
    """The result of an adaptation.

    Losses are in nats per token. Those on test documents are of states that have not been trained on them, and leave
    out boilerplate lines.

    Attributes:
        passed: whether the gate found the adapter better.
        active: whether it is the active version now.
        overtaken_by: the version that became active during the call, which this one was not compared with; this one is
            not active then. None if there is none.
        verdict: what the gate said: "better", "no gain", "worse than active", "worse than best", "not comparable",
            "not judged", "refit failed" or "forgets".
        explanation: why the gate found the adapter better or not, in words.
        name, version, adapter_path: where the adapter is; name and version are None outside the store.
        heldout_loss_before, heldout_loss_after: the loss on the test documents; None if they were not judged.
        gain: by how much it fell, as a share of the loss before; None if it was not judged.
        gain_at_least: the lower bound of the gain, with 95 % confidence.
        recipe: the name of the recipe.
        margin: the gain that the gate asks for.
        boilerplate: the loss on lines that stand in many documents; None if there are none.
        compared_with: the version that was active before; None if there was none.
        gain_over_active: the gain over that version, on documents that neither has been trained on; None if the two
            were not compared.
        gain_over_active_at_least: its lower bound, with 95 % confidence in all decisions of this name together; the
            gate asks for `-tolerance`.
        tolerance: how much worse than the active version a new one may be.
        not_comparable: why the two were not compared; empty if they were.
        best_before: the best version so far that could be compared, often the active one; None if there was none.
        gain_over_best, gain_over_best_at_least: as with the active version.
        is_best: whether it is the best version from now on, which takes that it is surely no worse.
        refused: how many versions the gate has refused beside an earlier one, this one included: the more, the surer a
            new one has to be.
        trained_on_all: whether the adapter was trained on all documents after the gate had judged it; this training is
            not judged by itself.
        refit_loss: the loss on the validation documents after that training, which has seen them.
        learnt_on_from: the version that it learnt on from; None if it learnt all documents.
        new, changed, gone: with `learnt_on_from`, how many documents that version did not know, and how many that it
            knew are gone; they stay known. A changed document is related to one that it knew.
        words: what ghost text would have done in the test documents, before and after; None if that was not counted.
        quiz: what a quiz showed; None if the recipe has none. If not None, the quiz decides.
        answers: the quiz's questions about notes, and the adapter's answers; `repr` and `to_dict` leave them out.
        authors: who wrote in chats and mails; for the screen only, so neither `repr` nor `to_dict` has them.
        concerns: what makes a gain on these texts meaningless, a sentence each; the gate then judges nothing.
        samples: continuations of test documents by the base model, the version before and the judged state; they
            contain the user's text, so `repr` leaves them out.
        expectation: what to expect of this adapter, in words.
        general_loss_before, general_loss_after: the loss on the bundled general text, of the base model and the
            adapter.
        language, facts: how many bundled items each knows: sentences beside the same with a mistake, and answers to
            general questions beside wrong ones; None if the model's chat template shows none.
        copies: documents that the adapter repeats word for word and the base model does not, longest first.
        documents, examples, tokens: how many of each were used.
        left_out: what was not used, with the reasons.
        padding_share: the share of padding if all examples are padded to the context length.
        tokens_per_second: tokens trained on per second of training, without padding.
        peak_memory_bytes: the process's peak memory: GPU memory, including CUDA's context and all else outside
            torch's allocator, or host memory on the CPU.
        allocator_peak_bytes: the part of it that is tensors on the GPU; None on the CPU.
        predicted_peak_bytes: the peak that the plan predicted for the process; None without a memory budget.
        seconds: the time from the call to the result, without time in which the process could not run.
        phases: the same by phase, as in `JobProgress` events.
        command: the command that uses the adapter.
        activation: the command, or outside of the default store the call, that activates the adapter; empty if it is
            active, or not in a store.
        report_command: the command that writes a page with all figures of the adapter.
    """

    saved: SavedAdapter
    report: Report
    judged: GateResult
    reference: ModelReference
    store: AdapterStore
    overtaken_by: int | None
    phases: dict[str, float]
    authors: tuple[Author, ...] = ()
    answers = _read("report.words.answers")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in _Facts.__annotations__ if name != "samples")
        return f"AdaptResult({', '.join(shown)})"

    @property
    def unchanged(self) -> bool:
        """False; True in an `UnchangedResult`."""
        return False

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the adaptation cost, if it is worth a warning; names documents, but has none of their text."""
        warnings, worse = [], []
        if any(probe is not None and probe.is_worse for probe in (self.language, self.facts)):
            worse.append(describe(self.language, self.facts))
        if not (rise := self.general_loss_after / self.general_loss_before - 1) <= HIGH_RISE:
            worse.append(f"it predicts general text {percent(rise)} worse")
        if worse:
            what = "; ".join(worse)
            warnings.append(
                f"The adapter is worse at what the model could before: {what}; fewer epochs or a lower learning rate "
                "cost less."
            )
        if self.copies:
            longest, number = self.copies[0], len(self.copies)
            what = f"{longest.run} tokens of {longest.document!r} word for word"
            if number > 1:
                what = (
                    f"parts of {number:,} documents word for word, up to {longest.run} tokens of {longest.document!r}"
                )
            alone = f"the base model alone {longest.base_run}"
            warnings.append(f"The adapter repeats {what} ({alone}); keep it as private as your texts.")
        return tuple(warnings)

    @property
    def headline(self) -> str:
        """The verdict, where the adapter is and, if it is active for that, what decided."""
        verdict = "Better" if self.passed else "Not judged" if self.verdict == "not judged" else "Not better"
        if self.version is None:
            return f"{verdict}: the adapter is saved in {str(self.adapter_path)!r}."
        state = "is active" if self.active else "is saved, but not active"
        anyway = ", as you asked with activate_anyway" if self.active and not self.passed else ""
        if self.active and self.passed:
            better = "predicts your texts" if self.quiz is None else "answers questions about notes"
            anyway = f", since it {better} better"
        return f"{verdict}: version {self.version} of {self.name!r} {state}{anyway}."

    @property
    def account(self) -> str:
        """Why the gate found it better or not, and what was done then."""
        if self.overtaken_by is not None:
            return (
                f"{self.explanation} But version {self.overtaken_by} became active meanwhile, and the two were not "
                "compared."
            )
        if not self.passed:
            stays = f" Version {self.compared_with} stays active." if self._is_worse and not self.active else ""
            return self.explanation + stays
        if self.refit_loss is not None and not self.trained_on_all:
            return (
                f"{self.explanation} A training on all documents made it no better, so the adapter is as it was tested."
            )
        if not self.trained_on_all:
            return self.explanation
        if self.learnt_on_from is None:
            return f"{self.explanation} Then it was trained on all documents."
        counts = ((self.new, "new"), (self.changed, "changed"))
        learnt = " and ".join(f"{number:,} {word}" for number, word in counts if number)
        documents = "document" if self.new + self.changed == 1 else "documents"
        return f"{self.explanation} Then it learnt {learnt} {documents} on top of version {self.learnt_on_from}."

    @property
    def _is_worse(self) -> bool:
        return self.verdict in (Verdict.WORSE_THAN_ACTIVE, Verdict.WORSE_THAN_BEST)

    @property
    def next_steps(self) -> dict[str, str]:
        """What to do next: what it is for, and the command."""
        steps = {"Activate it anyway": self.activation} if self.activation else {"Try it": self.command}
        return steps | {"All figures": self.report_command}

    @property
    def summary(self) -> str:
        """What happened and what to do next."""
        (what, command), *_ = self.next_steps.items()
        return f"{self.headline} {self.account} {what}: {command}"

    def to_dict(self) -> dict:
        """Returns the result as JSON-ready values: the last line of `sebp-edge adapt --json`."""
        return {
            "event": "result",
            "result_of": "adapt",
            "unchanged": self.unchanged,
            **{name: _plain(getattr(self, name)) for name in _Facts.__annotations__},
            "adapter_path": str(self.adapter_path),
            "warnings": self.warnings,
            "summary": self.summary,
        }


def _plain(value):
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return asdict(value) if is_dataclass(value) else value


def _boilerplate(tested: Tested | None) -> Boilerplate | None:
    if tested is None or tested.boilerplate_base is None:
        return None
    return Boilerplate(tested.boilerplate_share, tested.boilerplate_base, tested.boilerplate_adapted)


def _command(result: AdaptResult) -> str:
    """Returns the command that uses the adapter: by name if it is in the default store, else by folder."""
    saved, reference = result.saved, result.reference
    words = ["sebp-edge", "generate", "The first words" if result.report.record.prompts == "text" else "A question"]
    if result.quiz is not None and has_commands(result.store, saved):
        words = ["sebp-edge", "ask", "A question", "NOTES"]
    words += ["--name", saved.name] if has_commands(result.store, saved) else ["--adapter", str(saved.path)]
    if reference.has_path:
        words += ["--model", reference.location]
    return shlex.join(words)


def _activation(result: AdaptResult) -> str:
    saved = result.saved
    return "" if saved.active or saved.name is None else describe_activation(result.store, saved)


def _report_command(result: AdaptResult) -> str:
    """Returns the command that writes the adapter's page."""
    saved, words = result.saved, ["sebp-edge", "adapters", "report"]
    if not has_commands(result.store, saved):
        return shlex.join([*words, str(saved.path)])
    return shlex.join([*words, saved.name, *([] if saved.active else ["--version", str(saved.version)])])
