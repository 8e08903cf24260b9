"""Progress is reported, and a stop obeyed, while a single document is read, however long that takes."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from threading import Thread

import pytest

from sebp_edge.errors import TextsError
from sebp_edge.values.preparation_progress import SILENT, Progress

LONG = 20  # seconds, which no test takes


class Reports:
    """A sink that lets a reader go on at the third event."""

    def __init__(self):
        self.threads: list[threading.Thread] = []
        self.are_three = threading.Event()

    def __call__(self, event) -> None:
        self.threads.append(threading.current_thread())
        if len(self.threads) == 3:
            self.are_three.set()


def test_a_document_that_takes_long_is_reported_from_the_calling_thread():
    reports = Reports()

    def contents() -> Iterator[str]:
        yield "a"
        yield "b" if reports.are_three.wait(LONG) else "never reported"
        yield "c"

    progress = Progress(reports)
    progress.begin("reading", 3)
    assert list(progress.watch(contents())) == ["a", "b", "c"]
    assert set(reports.threads) == {threading.current_thread()}


def test_a_stop_does_not_wait_for_the_document():
    may_end, is_stopped = threading.Event(), threading.Event()

    def check() -> None:
        if is_stopped.is_set():
            raise KeyboardInterrupt

    def contents() -> Iterator[str]:
        is_stopped.set()
        may_end.wait(LONG)
        yield "a"

    with pytest.raises(KeyboardInterrupt):
        list(Progress(check=check).watch(contents()))
    may_end.set()


def test_errors_and_contexts_reach_the_other_side():
    place = ContextVar("place", default="nowhere")
    place.set("here")

    def contents() -> Iterator[str]:
        yield place.get()
        raise TextsError("no more")

    with pytest.raises(TextsError, match="no more"):
        list(Progress().watch(contents()))
    assert next(SILENT.watch(contents())) == "here"
    assert [each.run(place.get) for each in (Progress(), SILENT)] == ["here"] * 2


@pytest.mark.parametrize("number", [0, 1, 1001])
def test_nothing_is_lost_or_kept(number):
    assert list(Progress().watch(range(number))) == list(range(number))


def test_a_thread_that_is_slow_to_end_keeps_nobody_waiting():
    """On a busy machine, the next thread begins before the one before has left its function."""

    def slow_to_end(frame, event, _):
        if event == "return" and frame.f_code.co_name == "make_some":
            time.sleep(0.3)

    done = Future()
    reader = Thread(target=lambda: done.set_result(list(Progress().watch(range(3)))), daemon=True)
    threading.setprofile(slow_to_end)
    try:
        reader.start()
        assert done.result(timeout=60) == [0, 1, 2]
    finally:
        threading.setprofile(None)
