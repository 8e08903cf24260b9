"""The result of an adaptation."""

import shlex
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

from sebp_edge.basics.units import percent
from sebp_edge.engine.training.gate import Verdict
from sebp_edge.run.saving import describe_activation, has_commands
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.chats import Author
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.training_facts import Copied, Gains, TrainingFacts

# A higher rise of the loss on general text is warned of. Trainings that harm nothing raise it by up to 6 %.
HIGH_RISE = 0.1


@dataclass(frozen=True)
class Boilerplate:
    """The part of the test documents that is in lines which stand in many documents; losses in nats per token."""

    share_of_tokens: float
    loss_before: float
    loss_after: float


# The keys of the JSON, beside those of all messages, in this order.
KEYS = """
    passed active overtaken_by verdict explanation name version adapter_path heldout_loss_before heldout_loss_after
    gain gain_at_least recipe margin boilerplate compared_with gain_over_active gain_over_active_at_least tolerance
    not_comparable best_before gain_over_best gain_over_best_at_least is_best refused trained_on_all refit_loss
    learnt_on_from new changed gone quiz words concerns samples expectation general_loss_before general_loss_after
    language facts copies documents examples tokens left_out padding_share tokens_per_second peak_memory_bytes
    allocator_peak_bytes predicted_peak_bytes seconds phases command activation report_command
"""


class _Names:
    """Facts under the names that they have in the result."""

    unchanged: bool = False  # True in an `UnchangedResult`
    adapter_path: Path = property(lambda self: self.path)
    gain: float | None = property(lambda self: self.gains.over_base)
    gain_at_least: float | None = property(lambda self: self.gains.over_base_at_least)
    recipe: str = property(lambda self: self.record.recipe["name"])
    margin: float = property(lambda self: self.gains.margin)
    gain_over_active: float | None = property(lambda self: self.gains.over_active)
    gain_over_active_at_least: float | None = property(lambda self: self.gains.over_active_at_least)
    tolerance: float = property(lambda self: self.gains.tolerance)
    not_comparable: str = property(lambda self: self.gains.not_comparable)
    gain_over_best: float | None = property(lambda self: self.gains.over_best)
    gain_over_best_at_least: float | None = property(lambda self: self.gains.over_best_at_least)
    new: int = property(lambda self: self.learnt_on.new if self.learnt_on else 0)
    changed: int = property(lambda self: self.learnt_on.changed if self.learnt_on else 0)
    gone: int = property(lambda self: self.learnt_on.gone if self.learnt_on else 0)
    padding_share: float = property(lambda self: self.rows.padding_share)
    tokens_per_second: float = property(lambda self: self.cost.tokens_per_second)
    peak_memory_bytes: int = property(lambda self: self.cost.peak)
    allocator_peak_bytes: int | None = property(lambda self: self.cost.allocator_peak)
    predicted_peak_bytes: int | None = property(lambda self: self.cost.predicted)
    seconds: float = property(lambda self: sum(self.phases.values()))


@dataclass(frozen=True, repr=False, kw_only=True)
class AdaptResult(_Names, TrainingFacts, SavedAdapter):
    """The result of an adaptation: where the adapter is, and the facts of its training (see `TrainingFacts`).

    Losses are in nats per token. Those on test documents are of states that have not been trained on them, and leave
    out boilerplate lines. `repr` leaves out the samples, which contain the user's text.

    Attributes:
        active: whether it is the active version now.
        overtaken_by: the version that became active during the call, which this one was not compared with; this one is
            not active then. None if there is none.
        name, version, adapter_path: where the adapter is; name and version are None outside the store.
        recipe: the name of the recipe.
        gain, gain_at_least, gain_over_active, gain_over_active_at_least, gain_over_best, gain_over_best_at_least: by
            what share the test loss fell, and the lower bounds of that; these, `margin`, `tolerance` and
            `not_comparable` are those of `Gains`.
        new, changed, gone: those of `LearntOn`; 0 if it learnt all documents.
        padding_share: the share of padding if all examples are padded to the context length.
        tokens_per_second, peak_memory_bytes, allocator_peak_bytes, predicted_peak_bytes: those of `Cost`.
        answers: see `TrainingFacts`; `repr` and `to_dict` leave them out.
        authors: who wrote in chats and mails; for the screen only, so neither `repr` nor `to_dict` has them.
        seconds: the time from the call to the result, without time in which the process could not run.
        phases: the same by phase, as in `JobProgress` events.
    """

    # Known of each adaptation that was not stopped.
    verdict: str
    explanation: str
    trained_on_all: bool
    is_best: bool
    refused: int
    gains: Gains
    copies: tuple[Copied, ...]
    reference: ModelReference
    store: AdapterStore
    overtaken_by: int | None
    phases: dict[str, float]
    authors: tuple[Author, ...] = ()

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in KEYS.split() if name != "samples")
        return f"AdaptResult({', '.join(shown)})"

    @property
    def boilerplate(self) -> Boilerplate | None:
        """The loss on lines that stand in many documents; None if there are none."""
        if self.tested is None or self.tested.boilerplate_base is None:
            return None
        tested = self.tested
        return Boilerplate(tested.boilerplate_share, tested.boilerplate_base, tested.boilerplate_adapted)

    @property
    def command(self) -> str:
        """The command that uses the adapter: by name if it is in the default store, else by folder."""
        is_named = has_commands(self.store, self)
        words = ["sebp-edge", "generate", "The first words" if self.record.prompts == "text" else "A question"]
        if self.quiz is not None and is_named:
            words = ["sebp-edge", "ask", "A question", "NOTES"]
        words += ["--name", self.name] if is_named else ["--adapter", str(self.path)]
        if self.reference.has_path:
            words += ["--model", self.reference.location]
        return shlex.join(words)

    @property
    def activation(self) -> str:
        """The command, or outside of the default store the call, that activates the adapter.

        Empty if it is active, not in a store, or as the base model is.
        """
        is_useless = self.active or self.name is None or self._is_as_before
        return "" if is_useless else describe_activation(self.store, self)

    @property
    def _is_as_before(self) -> bool:
        """Whether nothing was learnt."""
        return self.verdict == Verdict.NO_GAIN and self.heldout_loss_after == self.heldout_loss_before

    @property
    def report_command(self) -> str:
        """The command that writes a page with all figures of the adapter."""
        words = ["sebp-edge", "adapters", "report"]
        if not has_commands(self.store, self):
            return shlex.join([*words, str(self.path)])
        return shlex.join([*words, self.name, *([] if self.active else ["--version", str(self.version)])])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the adaptation cost, if it is worth a warning; names documents, but has none of their text."""
        warnings, worse = [], []
        if any(probe is not None and probe.is_worse for probe in (self.language, self.facts)):
            worse.append(self.kept)
        before, after = self.general_loss_before, self.general_loss_after
        if before is not None and not (rise := after / before - 1) <= HIGH_RISE:
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
            is_worse = self.verdict in (Verdict.WORSE_THAN_ACTIVE, Verdict.WORSE_THAN_BEST)
            stays = f" Version {self.compared_with} stays active." if is_worse and not self.active else ""
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
    def next_steps(self) -> dict[str, str]:
        """What to do next: what it is for, and the command."""
        steps = {"Activate it anyway": self.activation} if self.activation else {"Try it": self.command}
        return ({} if self._is_as_before else steps) | {"All figures": self.report_command}

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
            **{name: _plain(getattr(self, name)) for name in KEYS.split()},
            "adapter_path": str(self.adapter_path),
            "warnings": self.warnings,
            "summary": self.summary,
        }


def _plain(value):
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return asdict(value) if is_dataclass(value) else value
