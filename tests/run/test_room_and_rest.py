"""When a call gives way: how much memory it leaves others, and how long it rests for a share of a GPU."""

import random
import time

import pytest
import torch
from builders import make_step
from failing_memory import recovering_learner, uneven_examples

from sebp_edge import Politeness
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.events import Notice
from sebp_edge.run import giving_way
from sebp_edge.run.giving_way import THREADS_BESIDE_GPU, GivingWay, Room
from sebp_edge.run.job import JobSink, WorkClock

CPU = torch.device("cpu")
GB = 10**9


def test_a_gpu_that_does_not_tell_who_uses_it_is_a_notice():
    events = []
    job = JobSink(events.append)
    GivingWay(Politeness(waits=True), torch.device("mps"), job, StopSignal()).wait_from_now_on()
    (notice,) = (event for event in events if isinstance(event, Notice))
    assert "does not wait" in notice.message


# ---------------------------------------------------------------------------------------------------------------- room


@pytest.fixture
def room(machine, process_memory):
    """The memory of a machine with 64 GB, and a function that sets what this process and others use."""

    def use(own, others):
        process_memory.used = own
        machine.has_memory(64 * GB - own - others, 64 * GB)

    use(GB, 0)
    return Room(CPU), use


def test_memory_lacks_if_others_leave_less_than_the_reserve_and_what_was_needed_before(room):
    found, use = room
    own, reserve = random.randint(GB, 20 * GB), 2 * 2**30
    others = 64 * GB - own - reserve
    use(own, others // 2)
    assert found.lacks() == 0
    use(own, others)
    assert found.lacks() == 0
    missing = random.randint(1, 10**9)
    use(own, others + missing)
    assert found.lacks() == missing
    use(GB, others + missing)  # freed, but it will be needed again
    assert found.lacks() == missing
    use(GB, others)
    assert found.lacks() == 0


def test_a_process_that_takes_the_reserve_itself_does_not_wait_for_others(room):
    found, use = room
    use(GB, 20 * GB)
    assert found.lacks() == 0
    use(43 * GB, 20 * GB)
    assert found.lacks() == 0
    use(43 * GB, 20 * GB + 10**8)  # others grew a little
    assert found.lacks() == 0


# ---------------------------------------------------------------------------------------------------------------- rest


class Clock:
    """A clock that only sleeping and the test move."""

    def __init__(self):
        self.now, self.slept = random.uniform(0, 1e6), 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(giving_way, "time", clock)
    return clock


def test_a_gpu_computes_for_its_share_of_the_time(clock):
    share = random.randint(5, 99)
    way = GivingWay(Politeness(gpu_share=share), CPU, JobSink(lambda event: None), StopSignal())
    worked = 0.0
    for _ in range(30):
        seconds = random.uniform(0.001, 2.0)
        worked, clock.now = worked + seconds, clock.now + seconds
        way.rest()
    assert 100 * worked / (worked + clock.slept) == pytest.approx(share)


def test_a_request_does_not_wait_for_the_end_of_a_rest_which_is_longer_then(clock):
    share, asked = random.randint(5, 95), random.uniform(0.0, 3.0)
    answered = []

    def meanwhile():
        if not answered and clock.now >= asked_at:
            answered.append(clock.now - asked_at)
            clock.now += took

    way = GivingWay(Politeness(gpu_share=share), CPU, JobSink(lambda event: None), StopSignal(), meanwhile)
    took, worked = random.uniform(0.1, 4.0), 4.0
    clock.now += worked
    # At some moment of the rest, if not right before its end.
    asked_at = clock.now + min(asked, 0.9 * worked * (100 / share - 1))
    way.rest()
    assert answered[0] <= giving_way.REST_SECONDS + 1e-6
    assert 100 * (worked + took) / (worked + took + clock.slept) == pytest.approx(share)


def test_a_gpu_rests_between_the_micro_batches_of_a_step(base):
    examples = uneven_examples()
    with recovering_learner(base, examples, max_rows=64) as learner:
        step, rests = make_step(learner, examples), []
        learner.breaks.rest = lambda: rests.append(None)
        learner.step(step, 1e-3)
        assert not rests  # on the CPU, the call is checked there
        learner.steps_ahead = 1  # as on a GPU
        learner.step(step, 1e-3)
    assert len(rests) == len(step.micro_batches) > 1


@pytest.mark.slow
def test_the_clock_stands_still_while_the_call_waits():
    with WorkClock() as clock:
        real, begin = time.perf_counter(), clock()
        with clock.standing_still():
            inside = clock()
            while time.perf_counter() - real < 0.7:
                assert clock() == inside
            waited = time.perf_counter()
        counted = clock() - begin
        assert 0 <= counted <= time.perf_counter() - waited + (inside - begin) + 1e-9


@pytest.mark.parametrize(
    ("device", "asked", "expected"), [("cuda", None, THREADS_BESIDE_GPU), ("cuda", 6, 6), ("cpu", None, 7)]
)
def test_a_call_on_a_gpu_wakes_few_threads_unless_more_are_asked_for(device, asked, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        way = GivingWay(Politeness(threads=asked), torch.device(device), JobSink(lambda event: None), StopSignal())
        with way.limited_threads():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
