"""Assesses an adaptation beside its training: the versions that it shall match, what it writes, and what it cost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from sebp_edge.ask.general_texts import encode_probes
from sebp_edge.engine.models.adaptation import Adaptation, load, take
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.training.copies import longest_copies
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import EarlierVersion, GateResult, Life
from sebp_edge.engine.training.probing import Probed, probe
from sebp_edge.engine.training.quiz import QuizResult, Replies
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.errors import AdapterError
from sebp_edge.events import Event
from sebp_edge.lessons.split_history import find_unseen
from sebp_edge.run.expectations import expectation, mostly_of_people
from sebp_edge.run.job import JobSink
from sebp_edge.run.known_losses import KnownLosses
from sebp_edge.run.replies import ask_quiz
from sebp_edge.run.samples import choose, continue_each, find_beginnings
from sebp_edge.run.work_ahead import ACTIVE, BASE_QUIZ, COPIED_TOKENS, COPIES, GENERAL, QUIZ, SAMPLES
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.version_documents import read_history
from sebp_edge.values.documents import Document
from sebp_edge.values.training_facts import Copied, Sample


@dataclass(frozen=True, kw_only=True)
class Assessment(Probed):
    """What was found beside the gate's losses; see `TrainingFacts`."""

    samples: tuple[Sample, ...]
    expectation: str
    copies: tuple[Copied, ...]


class Assessor:
    """Assesses one run, before its training and after it.

    Args:
        checks: are called after each event and each generated token; may raise a KeyboardInterrupt to stop.

    Attributes:
        known: what is known of test losses, once life is examined.
    """

    def __init__(self, run: TrainingRun, documents: list[Document], job: JobSink, checks: Sequence[Callable[[], None]]):
        self._run, self._documents, self._job, self._checks = run, documents, job, checks
        splits = run.task.dataset.splits()
        self._test = list(chain.from_iterable(split.test for split in splits))
        # Of the first fold, since the samples are those of its judged state.
        # A quiz shows its questions instead.
        shown = (
            sorted({example.document for example in splits[0].test}) if splits and run.task.dataset.quiz is None else []
        )
        self._beginnings = find_beginnings(documents, shown, run.base, chat_template=run.task.recipe.chat_template)
        self._active_state: Path | None = None  # the folder of the judged state of the version that was active
        self._quiz = run.task.dataset.quiz
        self._by_active: Replies | None = None
        self.known = KnownLosses(run.base, run.task.dataset)
        self._num_parameters = run.base.num_parameters  # later, those of the adapter would count too

    def examine_life(self, adapter: Adapter, *, compares: bool) -> Life:
        """Returns what a new version is compared with: earlier versions, with their losses on the run's test documents.

        Args:
            compares: whether it is compared with any.
        """
        best_versions, version = read_best_versions(adapter), adapter.active() if compares else None
        if version is None:
            return Life(refused=best_versions.refused)
        self._job.enter(ACTIVE)
        life = Life(self._examine(adapter, version, is_active=True), refused=best_versions.refused)
        if life.active.losses is None:
            return life
        for version in best_versions.best:
            if version == life.active.version:
                break
            best = self._examine(adapter, version)
            if best.losses is not None:
                return replace(life, best=best)
            life = replace(life, left_out=life.left_out or best)
        return life

    def ask_quiz(self, result: GateResult) -> GateResult:
        """Asks the quiz, if there is one, without the adaptation and with it; it decides."""
        if self._quiz is None:
            return result
        self._job.enter(BASE_QUIZ)
        with self._run.adaptation.disabled():
            before = ask_quiz(self._run.base, self._quiz, self._check)
        self._job.enter(QUIZ)
        after = ask_quiz(self._run.base, self._quiz, self._check)
        return self._run.judge_quiz(result, QuizResult(self._quiz, before, after, self._by_active))

    def assess(self, result: GateResult) -> Assessment:
        """Assesses the trained adaptation, which stays in its final state, or is detached at the end."""
        run, task, base, adaptation = self._run, self._run.task, self._run.base, self._run.adaptation
        self._job.enter(SAMPLES)
        decoder = Decoder(base.model)
        with decoder.holding_graphs():
            with adaptation.without_effect():
                by_base = continue_each(base, self._beginnings, self._check, decoder)
            with run.in_judged_state(result):
                after = continue_each(base, self._beginnings, self._check, decoder)
            before = self._continue_before(decoder)
        self._job.enter(GENERAL)
        probes = encode_probes(base.tokenizer, longest_sequence(base.model))
        probed = probe(base, adaptation, probes, self._on_event, task.options, self._check)
        self._job.enter(COPIES)
        examples, names = task.dataset.examples, [document.source for document in self._documents]
        copies = longest_copies(
            base, adaptation, examples, names, task.seed, COPIED_TOKENS, self._on_event, task.options, self._check
        )
        if before is None:
            run.detach()
            before = self._continue_before()
        texts = zip(self._beginnings, by_base, before, after, strict=True)
        return Assessment(
            samples=choose(
                Sample(shown.source, shown.text, alone, before, adapted) for shown, alone, before, adapted in texts
            ),
            expectation=expectation(
                base.reference,
                self._num_parameters,
                is_chat=task.dataset.is_chat,
                has_quiz=result.quiz is not None,
                of_people=mostly_of_people(document.content for document in self._documents),
            ),
            copies=tuple(copy for copy in copies if copy.is_learnt),
            **vars(probed),
        )

    def _examine(self, adapter: Adapter, version: int, *, is_active: bool = False) -> EarlierVersion:
        """Returns a version with its losses on the run's test documents that it has not been trained on."""
        if version not in adapter.versions():
            return EarlierVersion(version, None, "it was removed")
        try:
            return self._score_version(adapter.open(version), is_active=is_active)
        except AdapterError:
            return EarlierVersion(version, None, "its files are damaged, or of another sebp-edge")

    def _score_version(self, saved: SavedAdapter, *, is_active: bool) -> EarlierVersion:
        """Returns a version with its losses; without them if it is not comparable, or if a quiz compares.

        Raises:
            AdapterError: its files cannot be read.
        """
        unscored = EarlierVersion(saved.version, None)
        history = read_history(saved.path)
        if saved.record.fingerprint != self._run.base.fingerprint:
            return replace(unscored, reason=f"it was made for another base model, {saved.record.base_model}")
        states = saved.judged_states()
        if is_active:
            self._active_state = states[0]
        if self._quiz is not None:
            if is_active:
                with self._attached(states[0]):
                    self._by_active = ask_quiz(self._run.base, self._quiz, self._check)
            return unscored
        if history is None:
            return replace(unscored, reason="it was saved before sebp-edge recorded which documents are for test")
        unseen = find_unseen(history, self._run.task.dataset.draw.fingerprints)
        if not unseen.num_tests:
            return replace(unscored, reason="it was not judged itself")
        if saved.record.trained_on_all and states == [saved.path]:
            raise AdapterError(f"The judged states in {str(saved.path)!r} are missing.")
        if 2 * unseen.num_found < unseen.num_tests:
            among = f"{unseen.num_found or 'none'} of its {unseen.num_tests} test documents are among these texts"
            return replace(unscored, reason=among)
        numbered = enumerate(zip(states, self.known.read(saved, len(states)), strict=True))
        losses = [self._score(folder, number, unseen.states, own) for number, (folder, own) in numbered]
        merged = HeldOutLoss.merged(losses)
        if not merged.rest.tokens:
            return replace(unscored, reason="it was trained on all test documents of these texts")
        return replace(unscored, losses=merged)

    def _on_event(self, event: Event) -> None:
        self._job(event)
        self._check()

    def _check(self) -> None:
        for check in self._checks:
            check()

    @contextmanager
    def _attached(self, folder: Path) -> Iterator[Adaptation]:
        """Context with an earlier adapter, rounded as the new one is."""
        adaptation = load(self._run.base, folder)
        try:
            yield adaptation
        finally:
            adaptation.detach()

    def _continue_before(self, decoder: Decoder | None = None) -> list[str | None] | None:
        """Continues with the version that was active, in the adaptation's layers; returns None if it has others.

        Once the adaptation is detached, continues in its own layers.
        """
        run, folder = self._run, self._active_state
        with suppress(AdapterError):  # it is damaged, or was removed meanwhile
            if folder is not None and run.adaptation is None:
                with self._attached(folder):
                    return continue_each(run.base, self._beginnings, self._check)
            if folder is not None:
                with run.keeping_state() if run.task.recipe.method == "lora" else nullcontext():
                    fits = take(run.adaptation, run.base, folder)
                    return continue_each(run.base, self._beginnings, self._check, decoder) if fits else None
        return len(self._beginnings) * [None]

    def _score(self, folder: Path, number: int, states: Mapping[int, int | None], known: HeldOutLoss) -> HeldOutLoss:
        """Scores a judged state of an earlier version on the test documents that it has to be used for.

        Args:
            known: what is known of its losses.
        """
        examples = [
            example
            for example in self._test
            if example.document in states and (states[example.document] or 0) == number
        ]
        known = known.only({example.document for example in examples})
        new = [example for example in examples if example.document not in known.nats]
        if not new:
            return known
        with self._attached(folder) as adaptation:
            return HeldOutLoss.merged([known, self._run.score(adaptation, new)])
