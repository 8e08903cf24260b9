"""How an adaptation begins: at a version or at the base model.

Imports no torch.
"""

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from sebp_edge.basics.units import plural
from sebp_edge.errors import AdapterError, BaseModelMismatch
from sebp_edge.events import LearningOn, Notice
from sebp_edge.lessons.lesson_plans import plan_lessons
from sebp_edge.recipe import Recipe
from sebp_edge.run.texts_comparison import TextsComparison
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import refuse_truncated
from sebp_edge.store.version_documents import Entry, read_history
from sebp_edge.store.where import Where
from sebp_edge.values.draw import Draw
from sebp_edge.values.lessons import Lessons
from sebp_edge.values.remembered import SplitHistory

DAMAGED = "has damaged files"
NEEDED_FOR_TESTS = "was trained on documents that are needed for tests now"


@dataclass(frozen=True)
class Start:
    """A version that an adaptation may learn on from, on two tracks.

    The judged states never saw a test document; they learn on and are judged. The final state learns on in the last
    training, on all documents.

    Attributes:
        comparison: the version, and which documents it has learnt.
        entries: what its list of documents says of each, by key, without a number.
        states: the folders of its judged states.
    """

    comparison: TextsComparison
    history: SplitHistory
    entries: dict[int, Entry]
    states: list[Path]
    where: Where

    @classmethod
    def at(cls, comparison: TextsComparison, store: AdapterStore) -> "Start | None":
        """Returns the start at the compared version; None if its files are damaged: the values are not looked at."""
        try:
            saved = comparison.saved
            states, listed = saved.judged_states(), read_history(saved.path)
            for folder in {*states, saved.path}:
                refuse_truncated(folder)
        except AdapterError:
            return None
        if listed is None:
            return None
        entries = {document.key: Entry(tokens=document.tokens or 0, name=document.name) for document in listed.own}
        where = store.adapter(saved.name).wheres().get(saved.version, Where())
        return cls(comparison, listed, entries, states, where)

    def fill_in(self, recipe: Recipe) -> Recipe:
        """Returns a recipe with the version's own values for those that are left to the budget or to the size."""
        own = self.comparison.saved.record.recipe
        rate = own["learning_rate"] if len(recipe.learning_rates) > 1 else None
        return recipe.replace(r=own["r"], load_in_4bit=own["load_in_4bit"], learning_rate=rate)


@dataclass(frozen=True)
class StartingPoint:
    """How an adaptation begins: at a version, or at the base model.

    Attributes:
        active: the active version beside the texts, if it was to be learnt on from.
        start: the same, if it is; None for the base model.
        lessons: what the trainings train on; None for all documents.
        obstacle: why it does not begin at the active version, as a sentence's predicate; empty if there is none, or
            if it was not asked to.
        forgets: whether documents that are gone are forgotten.
    """

    active: TextsComparison | None = None
    start: Start | None = None
    lessons: Lessons | None = None
    obstacle: str = ""
    forgets: bool = False

    @classmethod
    def at(cls, active: TextsComparison | None, store: AdapterStore) -> "StartingPoint":
        """Begins at the active version, if there is one and nothing is known that is in the way."""
        if active is None or active.obstacle:
            return cls(active, obstacle=active.obstacle if active else "")
        start = Start.at(active, store)
        return cls(active, start, obstacle="" if start else DAMAGED)

    def with_lessons(self, draw: Draw, recipe: Recipe, seed: int, *, sync: bool) -> "StartingPoint":
        """Decides what is trained on; begins at the base model if that is not possible otherwise.

        Args:
            sync: whether documents that are gone are to be forgotten.
        """
        if self.start is None:
            return replace(self, forgets=sync)
        history, learnt = self.start.history, self.start.comparison.learnt
        options = {"trained_on_all": self.start.comparison.saved.record.trained_on_all, "refits": recipe.refits}
        lessons = plan_lessons(draw, history, learnt, seed, **options)
        if lessons is None:
            obstacle = NEEDED_FOR_TESTS
        elif sync and lessons.gone:
            obstacle = f"knows {plural(len(lessons.gone), 'document')} that --sync (sync=True) forgets"
        else:
            return replace(self, lessons=lessons)
        return StartingPoint(self.active, obstacle=obstacle, forgets=sync)

    @property
    def summary(self) -> str:
        """What is trained on, or why the training starts over, in words; empty if no version is active."""
        if self.has_nothing_new:
            return UnchangedResult.of(self.active).summary
        if self.obstacle:
            return f"All documents are learnt again, since version {self.active.version} {self.obstacle}."
        return self.event.summary if self.lessons else ""

    @property
    def event(self) -> LearningOn | Notice | None:
        """The event that says what is trained on, or why the training starts over; None if no version is active."""
        if self.lessons is None:
            return Notice(self.summary) if self.obstacle else None
        own = self.lessons
        new, changed, unchanged = len(own.new), len(own.changed), len(own.unchanged)
        return LearningOn(self.version, new, changed, unchanged, len(own.replayed), len(own.gone))

    @property
    def has_nothing_new(self) -> bool:
        """Whether the version has learnt all documents that have tokens to train on."""
        return self.lessons is not None and self.lessons.has_nothing_new

    @property
    def version(self) -> int | None:
        """The number of the version that is learnt on from; None if there is none."""
        return self.start and self.start.comparison.version

    def refuse_other_base(self, fingerprint: str) -> None:
        """Raises a BaseModelMismatch if the loaded base model is not the version's, although most of its files are."""
        if self.start is not None and self.start.comparison.saved.record.fingerprint != fingerprint:
            raise BaseModelMismatch(
                f"The base model has other weights than version {self.version} was made for; start over with --fresh "
                "(fresh=True)."
            )

    @property
    def folders(self) -> list[Path]:
        """The folders of the states that the trainings begin in, the last training's last; empty without a version."""
        return [*self.start.states, self.start.comparison.saved.path] if self.start else []


def latest_history(adapter: Adapter) -> SplitHistory:
    """Reads the history from which the next version of an adapter draws its splits; without one, draws a new salt.

    Raises:
        AdapterError: its list of documents is damaged.
    """
    version = version_with_history(adapter)
    if version is None:
        return SplitHistory(salt=secrets.token_bytes(16))
    return adapter.document_list(version)


def version_with_history(adapter: Adapter) -> int | None:
    """Returns the version from whose splits the next one draws its own; None if there is none.

    It is the active version, so that a rejected version takes no test documents from later ones; else the latest.

    Raises:
        AdapterError: its list of documents is damaged.
    """
    if not adapter.exists():
        return None
    active = adapter.active()
    ordered = sorted(adapter.versions(), key=lambda version: (version == active, version), reverse=True)
    return next((version for version in ordered if adapter.document_list(version) is not None), None)
