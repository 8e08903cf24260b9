"""One call as a job: gives its events their id, and tells how far the whole is, by a clock of its own.

The work ahead is a list of phases, each with the seconds that it is expected to take, in parts of a kind: steps,
evaluations, decoding and so on. As they are done, the seconds that each kind really takes correct the rest.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import psutil

from sebp_edge import events
from sebp_edge.basics.stopping import Check, StopSignal, in_thread
from sebp_edge.basics.units import duration
from sebp_edge.engine.models.libraries import quiet_libraries
from sebp_edge.events import Event, Sink, new_job, now

Result = TypeVar("Result")

# Between two events about the progress.
SECONDS = 0.5
# Of the whole, for what precedes the layout of the work.
PREPARATION_SHARE, PREPARATION_SECONDS = 0.05, 5.0
# An expectation weighs as much as this many seconds of measured work, of which the first also have what is done once.
TRUST, TRUST_IN_GUESSES = 10.0, 1.0
# An estimate that doubles by fewer seconds is not worth a notice.
WORTH_A_NOTICE = 60.0
# What is left of a part that takes longer than expected, as a share of what it has taken.
LATE = 0.1
# Seconds between two looks at the time; a longer gap in which nothing was computed is not counted.
INTERVAL, MAX_GAP = 0.1, 0.5
# Share of a gap that a process computes at least if it runs, also beside others.
MIN_COMPUTED = 0.1

# Kinds of work: the first three are counted, preparations in percent; the others take the time that they take.
STEPS, EVALUATIONS, PREPARING, DECODING = "steps", "evaluations", "preparing", "decoding"
LOADING, SAVING = "loading", "saving"
COUNTED, COMPUTED = (STEPS, EVALUATIONS, PREPARING), (STEPS, EVALUATIONS, DECODING)
# Phases that events begin.
GRADIENTS, WRITING, READING_BACK = "gradients", "writing", "reading back"


@dataclass
class Phase:
    """A part of the work ahead.

    Attributes:
        units: by kind, how many steps are to be done or examples evaluated.
        seconds: by kind, how long all of them are expected to take.
    """

    name: str
    units: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class WorkClock:
    """Counts the seconds in which the process can run: not those after SIGSTOP, or of a sleeping machine.

    As a context manager, it looks at the time in a thread of its own. So it sees a gap only if no thread ran, however
    long a step takes; and since a library may keep Python's lock for long, only if the process computed nothing either.
    """

    def __init__(self):
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._seen, self._computed, self._stopped = time.perf_counter(), time.process_time(), 0.0
        self._standing: float | None = None  # what it shows within `standing_still`

    def __call__(self) -> float:
        """Returns seconds; only differences mean something."""
        with self._lock:
            if self._standing is not None:
                return self._standing
            now, computed = time.perf_counter(), time.process_time()
            gap = now - self._seen
            if gap > MAX_GAP and computed - self._computed < MIN_COMPUTED * gap:
                self._stopped += gap
            self._seen, self._computed = now, computed
            return now - self._stopped

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Context in which it stands still, since the process waits."""
        standing = self()
        self._standing = standing
        try:
            yield
        finally:
            with self._lock:
                self._seen, self._computed, self._standing = time.perf_counter(), time.process_time(), None
                self._stopped = self._seen - standing

    def __enter__(self) -> "WorkClock":
        self()
        threading.Thread(target=self._watch, name="sebp-edge clock", daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._ends.set()

    def _watch(self) -> None:
        while not self._ends.wait(INTERVAL):
            self()


class JobSink:
    """The sink of one call; also a context manager, in which its clock runs.

    Args:
        clock: counts the seconds in which the process can run; by default a clock that runs in this context.

    Attributes:
        fraction: the share of the whole that was told to be done.
    """

    def __init__(self, on_event: Sink, clock: Callable[[], float] | None = None):
        self._own_clock = WorkClock()
        self.id, self.clock, self._on_event = new_job(), clock or self._own_clock, on_event
        self._ahead: list[Phase] = []
        self._phase = Phase("reading")
        self._is_laid_out = self._reports = self._is_guessed = False
        self._actual, self._expected = Counter(), Counter()  # seconds of what is done, by kind
        self._done = 0  # of the running evaluation, or stage of the preparation
        self._spent: Counter[str] = Counter()  # seconds in each phase that is over
        self._began = self._marked = self._entered = self.clock()
        self._sent, self.fraction, self._resumed_at = self._began, 0.0, 0.0
        self._told: float | None = None  # the least that was told for the whole, in seconds

    def __enter__(self) -> "JobSink":
        self._own_clock.__enter__()
        return self

    def __exit__(self, *args) -> None:
        self._own_clock.__exit__(*args)

    def __call__(self, event: Event) -> None:
        """Passes an event on, and counts what it says was done."""
        if isinstance(event, events.TrainingStarted):
            self.enter(event.phase)
            event = replace(event, time=now())  # after the phase's first event
        self._on_event(event.of_job(self.id))
        match event:
            case events.JobStarted():
                self._resumed_at = event.progress
                self._began = self.clock()
            case events.Waiting():
                self._reports = True
                self._on_event(events.JobProgress("waiting", round(self.fraction, 4), None).of_job(self.id))
            case events.StepDone():
                self._resize(STEPS, event.steps - event.step + 1)
                self._advance(STEPS, 1)
            case events.ExamplesEvaluated():
                self._done = 0 if event.done <= self._done else self._done
                self._advance(EVALUATIONS, event.done - self._done)
                self._done = event.done % event.examples
            case events.ExampleAnalyzed():
                self._part_done(GRADIENTS, event.example, event.examples)
            case events.TensorWritten():
                self._part_done(WRITING, event.tensor, event.tensors)
                if event.tensor == event.tensors:
                    self.enter(READING_BACK)
            case events.GraphCaptured() | events.MemoryProbed():
                self._marked = self.clock()  # the next step does not take this long again
            case events.PreparationProgress():
                self._prepared(event)

    def standing_still(self) -> AbstractContextManager[None]:
        """Context in which the call waits, which does not count."""
        return self._own_clock.standing_still()

    def begin(self, phases: Sequence[Phase] = ()) -> None:
        """Begins to report, before the work is laid out; the second time, what took time until then is left out.

        Args:
            phases: all of a call whose time nobody can expect; only that of its last phase is told, once measured.
        """
        self._spent.clear()
        self._began = self._marked = self._entered = self.clock()
        if not self._reports:
            self._reports, self._is_guessed = True, bool(phases)
            if phases:
                (self._phase, *self._ahead), self._is_laid_out = phases, True
            self._send(0.0, None)

    def lay_out(self, phases: Iterable[Phase]) -> None:
        """Takes these for all phases that are ahead; the current one goes on if it has the first one's name."""
        current, *ahead = phases
        if current.name == self._phase.name:
            self._phase, self._ahead = current, ahead
        else:
            self._ahead = [current, *ahead]
        self._reports = self._is_laid_out = True

    def enter(self, name: str) -> None:
        """Begins a phase, and tells it; those before it are over, or left out."""
        now = self.clock()
        self._spent[self._phase.name] += now - self._entered
        timed = [kind for kind in self._phase.seconds if kind not in COUNTED]
        if len(timed) == len(self._phase.seconds) == 1:
            self._actual[timed[0]] += now - self._entered
            self._expected[timed[0]] += self._phase.seconds[timed[0]]
        found = next((at for at, phase in enumerate(self._ahead) if phase.name == name), None)
        if found is None:
            self._phase = Phase(name)
        else:
            self._phase, self._ahead = self._ahead[found], self._ahead[found + 1 :]
        self._entered = self._marked = now
        self._done = 0
        self._sent = -math.inf
        self.tick()

    @property
    def spent(self) -> dict[str, float]:
        """The seconds in each phase, up to now; they add up to all since `begin`."""
        return dict(self._spent + Counter({self._phase.name: self.clock() - self._entered}))

    @property
    def seconds_left(self) -> float:
        """The estimate for all that is ahead."""
        return sum(map(self._left_of, [self._phase, *self._ahead]))

    def tick(self) -> None:
        """Tells the progress if that is due; called several times a second, in the call's thread."""
        if not self._reports:
            return
        now = self.clock()
        if now - self._sent < SECONDS:
            return
        elapsed = now - self._began
        if not self._is_laid_out:
            self._send(PREPARATION_SHARE * elapsed / (elapsed + PREPARATION_SECONDS), None)
            return
        left = self.seconds_left
        is_known = not self._is_guessed or (not self._ahead and any(self._actual[kind] for kind in self._phase.units))
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
        unwanted = StopSignal()

        def quietly() -> Result:
            with quiet_libraries():
                return compute(unwanted.check)

        try:
            return in_thread(quietly, check, SECONDS / 2)
        except BaseException:
            unwanted.set()
            raise

    def finish(self) -> None:
        """Tells that all is done, if the progress was told at all."""
        if self._reports:
            self._send(1.0, 0.0)

    def _send(self, fraction: float, left: float | None) -> None:
        self._sent = self.clock()
        fraction = self._resumed_at + (1 - self._resumed_at) * fraction
        self.fraction = max(self.fraction, fraction)
        self._on_event(
            events.JobProgress(self._phase.name, round(self.fraction, 4), left and round(left, 1)).of_job(self.id)
        )

    def _explain(self, total: float) -> None:
        """Says why the whole takes more than twice as long as was told."""
        told = self._told = min(total, math.inf if self._told is None else self._told)
        if total > max(2 * told, told + WORTH_A_NOTICE):
            self._told = total
            # More programs want to compute than there are cores, by half, in the last minute's mean.
            is_busy = psutil.getloadavg()[0] > 1.5 * (psutil.cpu_count() or 1)
            why = "This machine is busy" if is_busy else "This machine is slower than was expected"
            notice = f"{why}: it takes about {duration(total)} in all, and not {duration(told)}."
            self._on_event(events.Notice(notice).of_job(self.id))

    def _prepared(self, event: events.PreparationProgress) -> None:
        """Counts what is done of a stage, if that is a phase; before the work is laid out, each is."""
        is_phase = not self._is_laid_out or any(phase.name == event.stage for phase in self._ahead)
        if event.stage != self._phase.name and is_phase:
            self.enter(event.stage)
        if self._is_laid_out and event.stage == self._phase.name:
            done = 100 * event.done // max(1, event.total)
            self._advance(PREPARING, max(0, done - self._done))
            self._done = done

    def _part_done(self, name: str, done: int, total: int) -> None:
        """Counts a step of a phase, which its first one begins."""
        if name != self._phase.name:
            self.enter(name)
        self._resize(STEPS, total - done + 1)
        self._advance(STEPS, 1)

    def _resize(self, kind: str, units: int) -> None:
        """Corrects how many units of the current phase are left."""
        left = self._phase.units.get(kind, 0)
        if left:
            self._phase.units[kind] = units
            self._phase.seconds[kind] *= units / left

    def _advance(self, kind: str, units: int) -> None:
        """Counts the time since the last mark as that of some units of the current phase."""
        now, phase = self.clock(), self._phase
        left = phase.units.get(kind, 0)
        if left:
            done = min(units, left)
            seconds = phase.seconds[kind] * done / left
            phase.units[kind] -= done
            phase.seconds[kind] -= seconds
            self._actual[kind] += now - self._marked
            self._expected[kind] += seconds
        self._marked = now

    def _left_of(self, phase: Phase) -> float:
        left = 0.0
        for kind, seconds in phase.seconds.items():
            seconds *= self._slowness(kind)
            if kind not in COUNTED and phase is self._phase:
                taken = self.clock() - self._entered
                seconds = max(seconds - taken, LATE * taken)
            left += seconds
        return left

    def _slowness(self, kind: str) -> float:
        """Returns how much longer work of a kind takes than expected; that of others, until some of it is done."""
        actual, expected = (sum(times[each] for each in COMPUTED) for times in (self._actual, self._expected))
        trust = TRUST_IN_GUESSES if self._is_guessed else TRUST
        overall = 1.0 if kind not in COMPUTED else (trust + actual) / (trust + expected)
        return (trust * overall + self._actual[kind]) / (trust + self._expected[kind])
