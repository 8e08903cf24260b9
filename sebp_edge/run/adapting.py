"""One adaptation, from texts to a saved version."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median

from sebp_edge.basics.stopping import PauseRequested
from sebp_edge.basics.units import duration
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.models.adaptation import saved_bytes
from sebp_edge.engine.models.loading import decoder_config
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.engine.training.checkpoint import Checkpoints, RunState
from sebp_edge.engine.training.gate import Gate, GateResult, Life
from sebp_edge.engine.training.kernels_ahead import compiling_ahead
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.run import Task, TrainingRun
from sebp_edge.errors import (
    BaseModelMismatch,
    BudgetExceeded,
    Interrupted,
    MachineError,
    NonFiniteLoss,
    TrainingStopped,
)
from sebp_edge.events import AdapterSaved, Event, Notice
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.run.adaptation_job import AdaptationJob
from sebp_edge.run.assessment import Assessment, Assessor
from sebp_edge.run.call import Call
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.forgetting import Remaining
from sebp_edge.run.job import Phase
from sebp_edge.run.phases import LOAD
from sebp_edge.run.preparation import PlannedTraining, Prepared
from sebp_edge.run.reporting import Report
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.saving import NewVersion, Place, describe_activation, describe_location
from sebp_edge.run.start import StartingPoint
from sebp_edge.run.unchanged import UnchangedResult, find_unchanged
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.run.work_ahead import (
    ATTACH,
    SAVE,
    loading,
    phases_ahead,
    seconds_of_a_token,
)
from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.saved import SavedAdapter

# An adaptation that is expected to take longer sends a notice.
SLOW_SECONDS = 180


class Adapting:
    """An adaptation: what it trains on, where it is saved, how far it is, and what to say if it is stopped.

    `read` comes first, unless the texts are read already; then `run`.

    Args:
        activate_anyway, keep_samples: see `Personalizer.adapt`.
        compares: whether the gate compares it with earlier versions.

    Attributes:
        preparation: the texts; None until they are read.
        planned: the plan; None without a memory budget, and until it is made.
        training: the trainings and their tests; None until the model is loaded, and after the run.
        judged: what the gate says of it; None until it is trained.
        assessment: what was found beside; None until it is assessed, and if that was stopped.
        outcome: the error that says what was completed, for a call that is stopped after it was saved.
    """

    def __init__(
        self,
        call: Call,
        place: Place,
        work: AdaptationJob,
        *,
        activate_anyway: bool = False,
        keep_samples: bool = False,
        compares: bool = True,
        preparation: TrainingPreparation | None = None,
    ):
        call.job.begin()
        self._call, self._place, self._work = call, place, work
        self._checkpoints = Checkpoints(
            work.files,
            call.signal,
            call.job,
            self._state,
            self._is_between_steps,
            lambda: call.giving_way.is_due,
        )
        self._activate_anyway, self._keep_samples = activate_anyway, keep_samples
        self._compares = compares and place.out is None
        self._was_active: int | None = None
        self.preparation = preparation
        self.planned: PlannedTraining | None = None
        self.starting_point: StartingPoint | None = None
        self.training: TrainingRun | None = None
        self.texts = VersionTexts()
        self.judged: GateResult | None = None
        self.assessment: Assessment | None = None
        self.outcome: Interrupted | None = None

    def read(self, texts, *, fresh: bool, sync: bool) -> UnchangedResult | None:
        """Reads texts; compares them with those of the active version, and returns a result if nothing is new."""
        place, work, in_store = self._place, self._work, self._place.out is None
        earlier = work.history(place.adapter) if in_store else None
        self._call, reading = self._call.with_texts(texts, place.adapter if in_store and not fresh else None)
        call = self._call
        reading = work.same_texts(reading, call)
        earlier = earlier and work.drawn_from(earlier)
        self.preparation = TrainingPreparation(call, reading, earlier, keeps_splits=work.has_lost_texts)
        if not in_store:
            return None
        active, unchanged = find_unchanged(
            place.store, place.name, call.reference, call.recipe, call.seed, reading, fresh=fresh, sync=sync
        )
        if unchanged is not None:
            return unchanged
        if active is not None and active.name_in_use is not None and work.resumed is None:
            call.notify(active.name_in_use)
        if not fresh:
            self.preparation.learn_on_from(active, sync=sync)
            if self.preparation.starts_over:
                call.notify(Notice(self.preparation.starts_over))
        return None

    def run(self) -> AdaptResult | UnchangedResult:
        """Trains on the texts, judges and assesses the result, and saves it; see `Personalizer.adapt`."""
        try:
            self.plan()
            with self._call.make_guard(self.planned and self.planned.plan, self._peak) as guard:
                if not self.begin(guard):
                    return UnchangedResult.of(self.starting_point.active)
                handled = sys.exception()
                self._call.in_use.detach_adapter()
                try:
                    self.train()
                    self.assess()
                except BaseException as error:
                    self.give_up(error, handled)
                    raise
            return self.save()
        finally:
            # They refer to this object, so that their memory would stay until garbage is collected.
            self.training = self._assessor = self._checkpoints = None

    def plan(self) -> None:
        """Plans the training within the budget."""
        if (unused := devices.unused_gpus(self._call.device)) is not None:
            self._call.notify(Notice(unused))
        if self._work.resumed is None:
            self.planned = self.preparation.plan_within_budget()
        elif self._peak is not None:
            self.preparation.refuse_less_memory(self._peak)
        if (planned := self.planned) is not None:
            self._lay_out(planned.prepared, planned.schedules, planned.token, loading(planned.plan.chosen))
        self._call.job.enter(LOAD)

    @property
    def _peak(self) -> int | None:
        """The predicted peak memory; None without a plan."""
        if self._work.resumed is not None:
            return self._work.resumed.fixed.peak
        return self.planned and self.planned.plan.chosen.peak

    def begin(self, guard: MemoryGuard) -> bool:
        """Loads the model, encodes the texts and lays out the trainings; returns whether there is anything new."""
        call, preparation, planned = self._call, self.preparation, self.planned
        resumed, work = self._work.resumed, self._work
        recipe, options = (resumed.recipe, resumed.options) if resumed else preparation.chosen(planned)
        with self._compiling_ahead(recipe) if call.on_gpu else nullcontext():
            base = call.load(recipe)
            prepared = preparation.encode(base, planned)
        self.starting_point = prepared.starting_point
        if self.starting_point.has_nothing_new:
            return False
        self.starting_point.refuse_other_base(base.fingerprint)
        if self.starting_point.event is not None and self.starting_point.summary != preparation.starts_over:
            call.notify(self.starting_point.event)
        schedules = preparation.schedule(prepared, planned)
        rate = devices.matmul_rate(base.device, base.dtype)
        token = planned.token if planned else seconds_of_a_token(base.num_parameters, rate, on_gpu=call.on_gpu)
        self._lay_out(prepared, schedules, token)
        if (seconds := call.job.seconds_left) > SLOW_SECONDS:
            device, less = call.device.type.upper(), "a smaller model, fewer texts or fewer epochs take less time"
            call.notify(Notice(f"Training will take about {duration(seconds)} on this {device}; {less}."))
        if prepared.dataset.general:
            with call.base_model_alone("while it reads general text"):
                prepared = preparation.teach(prepared, base, options)
            schedules = preparation.schedule(prepared, planned)
        dataset = prepared.dataset
        self._place.store.check_disk_space(len(schedules) * saved_bytes(base, recipe), self._place.out)
        held = options if self._peak is not None else preparation.fill_free_memory(recipe, options, prepared, schedules)
        task = Task(dataset, schedules, recipe, call.seed, held, self.starting_point.folders)
        if self._place.out is None:
            texts = VersionTexts.of(preparation.reading, dataset, self.starting_point, call.reference)
            self.texts = work.known_by(texts)
            work.fix(call, self.texts, dataset.all_examples, base.fingerprint, recipe, options, self._peak)
        state, is_due, rest = resumed and resumed.state, self._checkpoints.due, call.giving_way.rest
        self.training = TrainingRun(
            base, task, guard, self._notify, call.job.clock, state, is_due=is_due, check=self._check, rest=rest
        )
        # The weights, two moments, and the best state.
        self._checkpoints.begin(4 * saved_bytes(base, recipe))
        return True

    def _compiling_ahead(self, recipe: Recipe) -> AbstractContextManager[None]:
        lengths = [document.num_characters for document in self.preparation.reading.documents]
        config = decoder_config(self._call.reference)
        return compiling_ahead(config, recipe, self._call.device, median(lengths) if lengths else 0)

    def train(self) -> None:
        """Trains, and tests beside the active version."""
        training, call = self.training, self._call
        checks = (self._check, self._call.interruptions.deliver)
        self._assessor = Assessor(training, self.preparation.reading.documents, call.job, checks)
        self._was_active = self._place.active_version
        place = self._place
        life = Life() if place.out else self._assessor.examine_life(place.adapter, compares=self._compares)
        if life.active is not None:
            self._was_active = life.active.version
        dataset = training.task.dataset
        call.job.enter(ATTACH)
        judged = training.train(Gate(training.task.recipe.margin, dataset.draw.cluster_of, not dataset.concerns, life))
        self.judged = self._assessor.ask_quiz(judged)

    def assess(self) -> None:
        """Assesses the adapter; a stop from now on ends only that, and does not lose the adapter."""
        self._call.interruptions.defer()
        try:
            self.assessment = self._assessor.assess(self.judged)
        except PauseRequested:
            raise
        except KeyboardInterrupt:
            pass

    def save(self) -> AdaptResult:
        """Saves the adapter; if it is better, uses it from now on, and activates it in the store.

        Raises:
            Interrupted: the assessment was stopped; the adapter is saved.
        """
        call, training, place, in_use = self._call, self.training, self._place, self._call.in_use
        call.job.enter(SAVE)
        is_activated, overtaken_by = self.judged.passed or self._activate_anyway, None
        report = Report.of(training, self.assessment, self.texts)
        version = NewVersion.of(training, self.texts, report, keeps_words=self._keep_samples)
        try:
            saved = place.save(version)
            if is_activated and place.out is None:
                saved, overtaken_by = self._activate(saved)
        except BaseException:
            self._discard()
            raise
        if is_activated and overtaken_by is None:
            in_use.use_adapter(training.adaptation, saved.path, report.record)
        else:
            self._discard()
        self.outcome = Interrupted(
            f"Interrupted after the training: {describe_location(saved)}.", name=saved.name, version=saved.version
        )
        self._call.interruptions.complete(self.outcome)
        self._work.end()
        self._announce(saved)
        if self.assessment is None:
            raise self.outcome
        authors, reference = self.preparation.reading.authors, call.reference
        return AdaptResult(saved, report, self.judged, reference, place.store, overtaken_by, call.job.spent, authors)

    def give_up(self, error: BaseException, handled: BaseException | None) -> None:
        """Restores the adapter that was in use; saves the best state so far if the training was stopped.

        Args:
            handled: an error that was handled before, whose frames keep what they reference.

        Raises:
            TrainingStopped: a stop, the memory budget or a loss that is not finite ended it; says what was saved.
            MachineError: memory ran out for a single example.
        """
        if isinstance(error, PauseRequested):
            devices.clear_frames(error, handled)
            return
        if isinstance(error, KeyboardInterrupt | NonFiniteLoss | BudgetExceeded):
            self._call.interruptions.defer()
            devices.clear_frames(error, handled)
            raise self._save_best_state(error) from error
        out_of_memory = devices.ran_out_of_memory(error)
        if out_of_memory:
            devices.clear_frames(error, handled)
            devices.release_memory(self._call.device)
        self._discard()
        if out_of_memory:
            raise self._out_of_memory_error() from error

    # -------------------------------------------------------------------------------------------------------- private

    def _notify(self, event: Event) -> None:
        """Sends an event of the training; see `_check`."""
        self._call.job(event)
        self._check()

    def _check(self) -> None:
        """Writes a checkpoint if that is due; ends the call if it was stopped or paused; gives way to others."""
        giving_way = self._call.giving_way
        self._checkpoints.check()
        if self._is_between_steps():
            giving_way.wait(may_free=not self._checkpoints.has_failed)
        giving_way.rest()
        self._call.job.tick()

    def _is_between_steps(self) -> bool:
        return self.training is None or self.training.is_between_steps

    def _state(self) -> RunState | None:
        """Returns how far the training is, with how much of the whole call is done."""
        state = self.training and self.training.state
        return state and replace(state, share=self._call.job.fraction)

    def _lay_out(self, prepared: Prepared, schedules: list[Schedule], token: float, *before: Phase) -> None:
        earlier = {self._place.active_version} - {None} if self._compares else set()
        if earlier:
            earlier |= {*read_best_versions(self._place.adapter).best[:1]}
        recipe = self.preparation.recipe.with_defaults()
        ahead = phases_ahead(prepared.dataset, schedules, recipe, token, num_earlier=len(earlier))
        self._call.job.lay_out([*before, *ahead])

    def _activate(self, saved: SavedAdapter) -> tuple[SavedAdapter, int | None]:
        """Activates the new version; unless another one became active meanwhile, which is returned and stays."""
        adapter = self._place.adapter
        if self._activate_anyway:
            return adapter.activate(saved.version), None
        saved, active = adapter.activate_after(saved.version, self._was_active)
        return saved, None if saved.active else active

    def _save_best_state(self, stop: BaseException) -> TrainingStopped:
        """Saves the best state so far as a version that is not active, if it has learnt anything; returns the error."""
        training = self.training
        error_type, reason = (
            (Interrupted, "Interrupted.") if isinstance(stop, KeyboardInterrupt) else (type(stop), str(stop))
        )
        progress = training.progress[-1] if training.progress else TrainingProgress()
        then = "" if error_type is NonFiniteLoss else self._work.way_to_go_on
        try:
            # The state of a training whose loss is not measured tells nobody whether it is of use.
            if training.result is None and not (progress.best_epoch and progress.best_validation):
                found = f"{reason} No state better than the start was found, so"
                goes_on = then and self._work.can_go_on
                outcome = f"no version was saved. To{then}" if goes_on else "nothing was saved."
                return error_type(f"{found} {outcome}")
            # It has not learnt all texts, so that no training can learn on from it.
            texts = replace(self.texts, known=None)
            report = Report.of(training, None, texts)
            version = NewVersion.of(training, texts, report, keeps_words=self._keep_samples)
            saved = replace(self._place, out=None).save(version, prefix=reason)
        finally:
            self._discard()
        self._work.survives(saved.version)
        self._announce(saved)
        state = "best state so far" if training.result is None else "state that was tested"
        return error_type(
            f"{reason} The {state} is saved as version {saved.version} of the adapter {saved.name!r}; it is not "
            f"active. To activate it: {describe_activation(self._place.store, saved)}{then and f'; to{then}'}",
            name=saved.name,
            version=saved.version,
        )

    def _announce(self, saved: SavedAdapter) -> None:
        self._call.remember_model(saved.record)
        # Not `notify`, which could still stop the call.
        self._call.job(AdapterSaved(saved.name, saved.version, str(saved.path), saved.active))

    def _discard(self) -> None:
        """Detaches the new adapter, and restores the one that was in use."""
        self.training.detach()
        self._call.in_use.restore_adapter(self._call.job)

    def _out_of_memory_error(self) -> MachineError:
        """Returns the error for a single example that does not fit into memory."""
        call, has_begun = self._call, any(progress.steps for progress in self.training.progress)
        when = "while training" if has_begun else "before the first step"
        smaller, others = "Choose a smaller model or a shorter context", "close other programs"
        advice = f"{smaller}, or {others}"
        if call.budget is not None:
            advice = f"{smaller}, {others}, or raise the memory budget of {call.budget}"
        return MachineError(f"Out of {call.device.type.upper()} memory {when}; nothing was saved. {advice}.")


def train_again(
    call: Call, place: Place, work: AdaptationJob, remaining: Remaining, *, activate_anyway: bool
) -> SavedAdapter:
    """Trains from the base model on the documents that remain of a version, with its splits, recipe and seed.

    The new version is saved, outside the store if the place is; the gate compares it with the base model only.

    Raises:
        BaseModelMismatch: the version was made for another base model.
    """
    record = remaining.record
    call = replace(call, recipe=Recipe.of_record(record.recipe), seed=record.seed)
    if call.load(call.recipe).fingerprint != record.fingerprint:
        raise BaseModelMismatch(
            f"The adapter was made for {record.base_model}, not for these weights of {call.reference.public_name}; "
            f"use {record.model!r}."
        )
    history = work.history(place.adapter, remaining.history)
    preparation = TrainingPreparation(call, work.same_texts(remaining.reading, call), history)
    adapting = Adapting(call, place, work, activate_anyway=activate_anyway, preparation=preparation, compares=False)
    return adapting.run().saved
