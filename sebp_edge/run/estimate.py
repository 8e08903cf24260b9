"""How much of a call is ahead, and how long that takes.

The work is a list of phases, each with the seconds that it is expected to take, in parts of a kind: steps, evaluations,
decoding and so on. As they are done, the seconds that each kind really takes correct the rest.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# An expectation weighs as much as this many seconds of measured work.
TRUST = 1.0
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


class Estimate:
    """The phases of a call, and the time that they take.

    Args:
        clock: counts the seconds in which the process can run.

    Attributes:
        phase, ahead: the current phase, and those after it.
        is_laid_out: whether all that is ahead is known.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.phase, self.ahead, self.is_laid_out = Phase("reading"), [], False
        self._actual, self._expected = Counter(), Counter()  # seconds of what is done, by kind
        self._done = 0  # of the running evaluation, or stage of the preparation
        self.begin()

    def begin(self) -> None:
        """Leaves out what took time until now."""
        self._spent: Counter[str] = Counter()  # seconds in each phase that is over
        self._marked = self._entered = self._clock()

    def lay_out(self, phases: Iterable[Phase]) -> None:
        """Takes these for all phases that are ahead; the current one goes on if it has the first one's name."""
        current, *ahead = phases
        if current.name == self.phase.name:
            self.phase, self.ahead = current, ahead
        else:
            self.ahead = [current, *ahead]
        self.is_laid_out = True

    def enter(self, name: str) -> None:
        """Begins a phase; those before it are over, or left out."""
        now = self._clock()
        self._spent[self.phase.name] += now - self._entered
        timed = [kind for kind in self.phase.seconds if kind not in COUNTED]
        if len(timed) == len(self.phase.seconds) == 1:
            self._actual[timed[0]] += now - self._entered
            self._expected[timed[0]] += self.phase.seconds[timed[0]]
        found = next((at for at, phase in enumerate(self.ahead) if phase.name == name), None)
        if found is None:
            self.phase = Phase(name)
        else:
            self.phase, self.ahead = self.ahead[found], self.ahead[found + 1 :]
        self._entered = self._marked = now
        self._done = 0

    @property
    def spent(self) -> dict[str, float]:
        """The seconds in each phase, up to now; they add up to all since `begin`."""
        return dict(self._spent + Counter({self.phase.name: self._clock() - self._entered}))

    @property
    def seconds_left(self) -> float:
        """The estimate for all that is ahead."""
        return sum(map(self._left_of, [self.phase, *self.ahead]))

    @property
    def is_measured(self) -> bool:
        """Whether some of the current phase is done."""
        return any(self._actual[kind] for kind in self.phase.units)

    def mark(self) -> None:
        """Leaves out what took time since the last step, which the next one does not take again."""
        self._marked = self._clock()

    def count_step(self, step: int, steps: int) -> None:
        """Counts a step of the current phase, and corrects how many are left."""
        left, now_left = self.phase.units.get(STEPS, 0), steps - step + 1
        if left:
            self.phase.units[STEPS] = now_left
            self.phase.seconds[STEPS] *= now_left / left
        self._advance(STEPS, 1)

    def count_evaluated(self, done: int, examples: int) -> None:
        """Counts what is done of an evaluation, which may be a new one."""
        self._advance(EVALUATIONS, done - (0 if done <= self._done else self._done))
        self._done = done % examples

    def count_prepared(self, percent: int) -> None:
        """Counts what is done of the current stage of the preparation."""
        self._advance(PREPARING, max(0, percent - self._done))
        self._done = percent

    # -------------------------------------------------------------------------------------------------------- private

    def _advance(self, kind: str, units: int) -> None:
        """Counts the time since the last mark as that of some units of the current phase."""
        now, phase = self._clock(), self.phase
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
            if kind not in COUNTED and phase is self.phase:
                taken = self._clock() - self._entered
                seconds = max(seconds - taken, LATE * taken)
            left += seconds
        return left

    def _slowness(self, kind: str) -> float:
        """Returns how much longer work of a kind takes than expected; that of others, until some of it is done."""
        actual, expected = (sum(times[each] for each in COMPUTED) for times in (self._actual, self._expected))
        overall = 1.0 if kind not in COMPUTED else (TRUST + actual) / (TRUST + expected)
        return (TRUST * overall + self._actual[kind]) / (TRUST + self._expected[kind])
