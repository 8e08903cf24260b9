"""One call as a job: gives its events their id, and tells how far the whole is."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import replace
from threading import Thread
from typing import TypeVar

import psutil

from sebp_edge.basics.stopping import Check, StopSignal
from sebp_edge.basics.units import duration
from sebp_edge.engine.models.libraries import quiet_libraries
from sebp_edge.events import (
    Event,
    ExampleAnalyzed,
    ExamplesEvaluated,
    GraphCaptured,
    JobProgress,
    JobStarted,
    MemoryProbed,
    Notice,
    PreparationProgress,
    Sink,
    StepDone,
    TensorWritten,
    TrainingStarted,
    Waiting,
    new_job,
    now,
)
from sebp_edge.run.estimate import GRADIENTS, READING_BACK, WRITING, Estimate, Phase, WorkClock

Result = TypeVar("Result")

# Between two events about the progress.
SECONDS = 0.5
# Of the whole, for what precedes the layout of the work.
PREPARATION_SHARE, PREPARATION_SECONDS = 0.05, 5.0
# An estimate that doubles by fewer seconds is not worth a notice.
WORTH_A_NOTICE = 30.0


class JobSink:
    """The sink of one call; also a context manager, in which its clock runs.

    Args:
        clock: counts the seconds in which the process can run; by default a clock that runs in this context.

    Attributes:
        estimate: what is ahead, and the time that each phase took.
        fraction: the share of the whole that was told to be done.
    """

    def __init__(self, on_event: Sink, id: str | None = None, clock: Callable[[], float] | None = None):
        self._own_clock = WorkClock()
        self.id, self.clock, self._on_event = id or new_job(), clock or self._own_clock, on_event
        self.estimate = Estimate(self.clock)
        self._reports = self._is_guessed = False
        self._began = self.clock()
        self._sent, self.fraction, self._resumed_at = self._began, 0.0, 0.0
        self._told: float | None = None  # the least that was told for the whole, in seconds

    def __enter__(self) -> "JobSink":
        self._own_clock.__enter__()
        return self

    def __exit__(self, *args) -> None:
        self._own_clock.__exit__(*args)

    def __call__(self, event: Event) -> None:
        """Passes an event on, and counts what it says was done."""
        if isinstance(event, TrainingStarted):
            self.enter(event.phase)
            event = replace(event, time=now())  # after the phase's first event
        self._on_event(event.of_job(self.id))
        match event:
            case JobStarted():
                self._resumed_at = event.progress
                self._began = self.clock()
            case Waiting():
                self._reports = True
                self._on_event(JobProgress("waiting", round(self.fraction, 4), None).of_job(self.id))
            case StepDone():
                self.estimate.count_step(event.step, event.steps)
            case ExamplesEvaluated():
                self.estimate.count_evaluated(event.done, event.examples)
            case ExampleAnalyzed():
                self._part_done(GRADIENTS, event.example, event.examples)
            case TensorWritten():
                self._part_done(WRITING, event.tensor, event.tensors)
                if event.tensor == event.tensors:
                    self.enter(READING_BACK)
            case GraphCaptured() | MemoryProbed():
                self.estimate.mark()
            case PreparationProgress():
                self._prepared(event)

    def standing_still(self) -> AbstractContextManager[None]:
        """Context in which the call waits, which does not count."""
        return self._own_clock.standing_still()

    def begin(self, phases: Sequence[Phase] = ()) -> None:
        """Begins to report, before the work is laid out; the second time, what took time until then is left out.

        Args:
            phases: all of a call whose time nobody can expect; only that of its last phase is told, once measured.
        """
        self._began = self.clock()
        self.estimate.begin()
        if not self._reports:
            self._reports, self._is_guessed = True, bool(phases)
            if phases:
                self.estimate.phase = phases[0]
                self.estimate.lay_out(phases)
            self._send(0.0, None)

    def lay_out(self, phases: Iterable[Phase]) -> None:
        """Takes these for all phases that are ahead; the current one goes on if it has the first one's name."""
        self.estimate.lay_out(phases)
        self._reports = True

    def enter(self, name: str) -> None:
        """Begins a phase, and tells it; those before it are over, or left out."""
        self.estimate.enter(name)
        self._sent = -math.inf
        self.tick()

    def tick(self) -> None:
        """Tells the progress if that is due; called several times a second, in the call's thread."""
        if not self._reports:
            return
        now = self.clock()
        if now - self._sent < SECONDS:
            return
        elapsed = now - self._began
        if not self.estimate.is_laid_out:
            self._send(PREPARATION_SHARE * elapsed / (elapsed + PREPARATION_SECONDS), None)
            return
        left = self.estimate.seconds_left
        is_known = not self._is_guessed or (not self.estimate.ahead and self.estimate.is_measured)
        if is_known:
            self._explain(elapsed + left)
        # Only the end is all of it.
        self._send(min(elapsed / (elapsed + left), 0.999) if elapsed else 0.0, left if is_known else None)

    def watch(self, compute: Callable[[Check], Result], check: Check) -> Result:
        """Returns what a function returns that tells nothing itself: it runs in a thread, and this one reports.

        After a stop, nobody waits for it, and the check that the function is given ends it.
        """
        if not self._reports:
            return compute(check)
        made, unwanted = Future(), StopSignal()

        def run() -> None:
            try:
                with quiet_libraries():
                    made.set_result(compute(unwanted.check))
            except BaseException as error:
                made.set_exception(error)

        Thread(target=copy_context().run, args=(run,), daemon=True).start()
        try:
            while not wait([made], SECONDS / 2).done:
                check()
        except BaseException:
            unwanted.set()
            raise
        return made.result()

    def finish(self) -> None:
        """Tells that all is done, if the progress was told at all."""
        if self._reports:
            self._send(1.0, 0.0)

    # -------------------------------------------------------------------------------------------------------- private

    def _send(self, fraction: float, left: float | None) -> None:
        self._sent = self.clock()
        fraction = self._resumed_at + (1 - self._resumed_at) * fraction
        self.fraction = max(self.fraction, fraction)
        phase = self.estimate.phase.name
        self._on_event(JobProgress(phase, round(self.fraction, 4), left and round(left, 1)).of_job(self.id))

    def _explain(self, total: float) -> None:
        """Says why the whole takes more than twice as long as was told."""
        told = self._told = min(total, math.inf if self._told is None else self._told)
        if total > max(2 * told, told + WORTH_A_NOTICE):
            self._told = total
            # More programs want to compute than there are cores, by half, in the last minute's mean.
            is_busy = psutil.getloadavg()[0] > 1.5 * (psutil.cpu_count() or 1)
            why = "This machine is busy" if is_busy else "This machine is slower than was expected"
            notice = f"{why}: it takes about {duration(total)} in all, and not {duration(told)}."
            self._on_event(Notice(notice).of_job(self.id))

    def _prepared(self, event: PreparationProgress) -> None:
        """Counts what is done of a stage, if that is a phase; before the work is laid out, each is."""
        estimate = self.estimate
        is_phase = not estimate.is_laid_out or any(phase.name == event.stage for phase in estimate.ahead)
        if event.stage != estimate.phase.name and is_phase:
            self.enter(event.stage)
        if estimate.is_laid_out and event.stage == estimate.phase.name:
            estimate.count_prepared(100 * event.done // max(1, event.total))

    def _part_done(self, name: str, done: int, total: int) -> None:
        """Counts a step of a phase, which its first one begins."""
        if name != self.estimate.phase.name:
            self.enter(name)
        self.estimate.count_step(done, total)
