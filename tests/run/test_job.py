"""One progress figure for a whole call, corrected by what its parts really take; and a stop that counts for nothing."""

import math
import os
import random
import signal
import time
from pathlib import Path
from threading import Event

import pytest
from command import start

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.events import (
    ExampleAnalyzed,
    ExamplesEvaluated,
    JobProgress,
    JobStarted,
    Notice,
    PreparationProgress,
    StepDone,
    TensorWritten,
    TrainingStarted,
)
from sebp_edge.run.job import DECODING, EVALUATIONS, MAX_GAP, SAVING, STEPS, JobSink, Phase
from sebp_edge.run.work_ahead import phases_of_analysis, phases_of_export

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


class Clock:
    """A clock that only the test moves."""

    def __init__(self):
        self.seconds = random.uniform(-1e6, 1e6)

    def __call__(self):
        return self.seconds


def begun(phases=()):
    """A job that has begun, with a clock that only the test moves, and the events that it has sent."""
    events = []
    made = JobSink(events.append, clock=Clock())
    made.events = events
    made.begin(phases)
    return made


@pytest.fixture
def job():
    return begun()


def spend(job, seconds, event=None):
    job.clock.seconds += seconds
    if event is not None:
        job(event)
    job.tick()


def step(number, steps):
    return StepDone("train", number, steps, 1, 1.0, 1e-3, 1.0, 10, 10.0, 0.0)


def told(job):
    return [event for event in job.events if isinstance(event, JobProgress)]


def train(job, seconds_of_a_step, steps=10, examples=4):
    job(TrainingStarted("train", 1, 1, 1, 1))
    for done in range(1, examples + 1):
        spend(job, seconds_of_a_step / 2, ExamplesEvaluated(done, examples))
    for number in range(1, steps + 1):
        spend(job, seconds_of_a_step, step(number, steps))


def layout(seconds_of_a_step, steps=10, examples=4):
    trained = {STEPS: seconds_of_a_step * steps, EVALUATIONS: seconds_of_a_step * examples / 2}
    return [
        Phase("train", {STEPS: steps, EVALUATIONS: examples}, trained),
        Phase("samples", seconds={DECODING: 3 * seconds_of_a_step}),
        Phase("saving", seconds={SAVING: 1.0}),
    ]


def test_an_expectation_that_holds_is_the_time_that_is_left(job):
    job.lay_out(layout(2.0))
    begin, whole = job.clock(), 24.0 + 6 + 1
    train(job, 2.0)
    job.enter("samples")
    spend(job, 6.0)
    job.enter("saving")
    spend(job, 1.0)
    assert job.clock() - begin == pytest.approx(whole)
    job.finish()
    *events, last = told(job)[1:]
    assert (last.fraction, last.seconds_left) == (1.0, 0.0)
    for done, event in zip((0, 1, 2, 3, 4, 6, 8, 10), events, strict=False):
        assert event.seconds_left == pytest.approx(whole - done, abs=0.06)
        assert event.fraction == pytest.approx(done / whole, abs=1e-3)


@pytest.mark.parametrize("factor", [0.1, 1, 7.5])
def test_what_steps_really_take_corrects_the_rest(job, factor):
    job.lay_out(layout(10.0, steps=40))
    train(job, 10 * factor, steps=40)
    spend(job, 1.0)
    assert told(job)[-1].seconds_left == pytest.approx(30 * factor + 1, rel=0.25)


def test_the_figure_never_falls_and_is_whole_only_at_the_end(job):
    draw = random.Random()
    job.lay_out(layout(1.0))
    for number in range(1, 60):
        spend(job, draw.expovariate(0.5), step(1 + number // 7, 10) if draw.random() < 0.7 else Notice("x"))
    job.lay_out([*layout(9.0), *layout(draw.uniform(1, 100))])
    spend(job, 1.0)
    fractions = [event.fraction for event in told(job)]
    assert fractions == sorted(fractions) and max(fractions) < 1
    job.finish()
    assert told(job)[-1].fraction == 1


def test_a_training_that_goes_on_begins_at_what_was_done(job):
    job(JobStarted("861167", 0.4))
    job.lay_out([Phase("train", {STEPS: 10}, {STEPS: 10.0})])
    train(job, 1.0, examples=0)
    job.finish()
    figures = [event.fraction for event in told(job)]
    assert figures == sorted(figures) and figures[0] == 0
    assert min(figures[1:]) >= 0.4 and figures[-1] == 1
    assert any(0.65 < figure < 0.75 for figure in figures)  # half of the rest


def test_every_event_has_the_id_of_the_job_and_a_call_that_has_not_begun_to_report_tells_no_progress():
    events = []
    job = JobSink(events.append)
    job.id = "an id"
    job(Notice("x"))
    job.tick()
    job.finish()
    assert [(type(event), event.job) for event in events] == [(Notice, "an id")]


@pytest.mark.slow
def test_what_tells_nothing_itself_is_watched(tell_after):
    tell_after(0.05)
    events, are_three = [], Event()

    def told(event):
        events.append(event)
        if len(events) == 3:
            are_three.set()

    with JobSink(told) as job:
        job.begin()
        assert job.watch(lambda check: are_three.wait(60), job.tick)
        with pytest.raises(ZeroDivisionError):
            job.watch(lambda check: 1 / 0, job.tick)


def test_what_is_watched_can_be_stopped(job):
    def stop():
        raise StopRequested

    ended = Event()

    def work(check):
        try:
            while not ended.wait(0.01):
                check()
        except StopRequested:
            ended.set()

    with pytest.raises(StopRequested):
        job.watch(work, stop)
    assert ended.wait(60)  # nobody needs its result, so it ends too


# -------------------------------------------------------------------------------------------------------------- clock


def stop_for(seconds, *processes):
    """Stops processes by SIGSTOP for some seconds."""
    for one in processes:
        os.kill(one.pid, signal.SIGSTOP)
    for one in processes:
        while Path(f"/proc/{one.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)
    time.sleep(seconds)
    for one in processes:
        os.kill(one.pid, signal.SIGCONT)


@pytest.mark.slow
@needs_proc
def test_the_clock_stands_still_while_the_process_is_stopped():
    """Whether it computes or waits."""
    code = """
import sys, time
from sebp_edge.run.job import WorkClock
with WorkClock() as clock:
    begin, real = clock(), time.perf_counter()
    print("go", flush=True)
    if sys.argv[1] == "busy":
        while time.perf_counter() - real < float(sys.argv[2]):
            sum(range(1000))
    else:
        sys.stdin.readline()
    print(clock() - begin, time.perf_counter() - real)
"""
    seconds = 3 * MAX_GAP
    busy, idle = (start([code, kind, seconds + 0.5], cold=True, stdin=-1) for kind in ("busy", "idle"))
    with busy, idle:
        assert [one.stdout.readline() for one in (busy, idle)] == ["go\n", "go\n"]
        stop_for(seconds, busy, idle)
        for one in (idle, busy):
            counted, real = map(float, one.communicate("\n", timeout=60)[0].split())
            assert counted <= real - seconds + MAX_GAP


def prepare(job, *stages, seconds=1.0):
    for stage in stages:
        for done in (0, 13, 37, 37):
            spend(job, seconds, PreparationProgress(stage, done, 37))


def assert_it_grows_from_0_to_1(job, phases):
    job.finish()
    fractions = [event.fraction for event in told(job)]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert fractions == sorted(fractions)
    assert max(fractions[:-1]) < 1
    assert list(dict.fromkeys(event.phase for event in told(job))) == phases


def test_the_progress_of_an_analysis_is_that_of_the_whole_call_and_its_time_that_of_the_examples():
    job = begun(phases_of_analysis(16))
    prepare(job, "reading")
    job.enter("loading")
    spend(job, 5.0)
    prepare(job, "comparing", "tokenising")
    assert all(event.seconds_left is None for event in told(job))
    job.enter("gradients")
    for number in range(1, 11):  # there are fewer than were asked for
        spend(job, 3.0, ExampleAnalyzed(number, 10))
    left = [event.seconds_left for event in told(job) if event.seconds_left is not None]
    assert left[4] == pytest.approx(5 * 3.0, rel=0.2)
    assert_it_grows_from_0_to_1(job, ["reading", "loading", "comparing", "tokenising", "gradients"])


def test_the_progress_of_an_export_goes_on_while_it_is_read_back():
    job = begun(phases_of_export())
    spend(job, 1.0)
    for number in range(1, 31):
        spend(job, 1.0, TensorWritten(number, 30))
    written = told(job)[-1].fraction
    for _ in range(3):
        spend(job, 5.0)
    assert written < told(job)[-1].fraction
    assert_it_grows_from_0_to_1(job, ["loading", "writing", "reading back"])


def test_each_phase_is_told_when_it_begins(job):
    job.lay_out([Phase("samples", seconds={DECODING: 1.0}), Phase("saving", seconds={SAVING: 1.0})])
    for name in ("samples", "copies", "saving"):  # whether it was laid out or not
        job.enter(name)
        assert told(job)[-1].phase == name
        job.clock.seconds += 0.01


def test_the_seconds_of_the_phases_add_up_to_all(job):
    durations = [random.uniform(1.0, 9.0) for _ in range(6)]
    began, (reading, comparing, loading, attaching, again, open_end) = job.clock(), durations
    job.clock.seconds += reading
    job(PreparationProgress("comparing", 0, 9))
    job.clock.seconds += comparing
    job.enter("loading")
    job.lay_out([Phase("train", {STEPS: 4}, {STEPS: 4.0})])
    job.clock.seconds += loading
    for seconds in (attaching, again):  # a phase may come twice
        job.enter("attaching")
        job.clock.seconds += seconds
    job(TrainingStarted("train", 1, 1, 1, 1))
    spend(job, open_end, step(1, 4))
    expected = {"reading": reading, "comparing": comparing, "loading": loading, "attaching": attaching + again}
    assert job.spent == pytest.approx(expected | {"train": open_end}, abs=1e-6)
    assert sum(job.spent.values()) == pytest.approx(job.clock() - began, abs=1e-6)
    job.begin()
    assert sum(job.spent.values()) == 0


@pytest.mark.parametrize("seconds", [8.0, 44.0])
def test_a_call_that_takes_less_than_a_minute_more_needs_no_notice(job, seconds):
    """As one whose kernels are compiled first, or whose evaluation takes more for each token."""
    job.lay_out([Phase("train", {STEPS: 4}, {STEPS: seconds})])
    job(TrainingStarted("train", 1, 1, 1, 1))
    for number in range(1, 5):
        spend(job, seconds / 4 + 12, step(number, 4))
    assert not [event for event in job.events if isinstance(event, Notice)]


@pytest.mark.parametrize(("is_busy", "why"), [(True, "This machine is busy"), (False, "This machine is slower")])
def test_an_estimate_that_doubles_says_why(job, monkeypatch, is_busy, why):
    monkeypatch.setattr("psutil.getloadavg", lambda: (1000.0 * is_busy, 0.0, 0.0))
    job.lay_out(layout(6.0, steps=40))
    train(job, 6.0, steps=20)
    assert not [event for event in job.events if isinstance(event, Notice)]
    for number in range(21, 31):
        spend(job, 60.0, step(number, 40))
    notices = [event.message for event in job.events if isinstance(event, Notice)]
    assert notices and all(notice.startswith(why) for notice in notices)
    # What is told later is at most a minute more, or twice as much, or a sentence stands between.
    begin, least = job.events[0], math.inf
    for event in job.events:
        if isinstance(event, Notice):
            least = math.inf
        elif isinstance(event, JobProgress) and event.seconds_left and event.fraction:
            whole = event.seconds_left / (1 - event.fraction)
            assert whole <= 2 * least + 61 or event is begin
            least = min(least, whole)
