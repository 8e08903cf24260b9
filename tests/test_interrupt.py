"""Ctrl-C is never lost: a step after one that something swallowed stops the training."""

import signal
from contextlib import suppress

import pytest

from sebp_edge.cli.interrupt import heeding_ctrl_c
from sebp_edge.events import AdapterSaved, Notice, StepDone

STEP = StepDone("train", 1, 2, 1, 5.0, 1e-3, 1.0, 10, 100.0, 1.0)


def test_an_interruption_that_was_swallowed_stops_the_next_step_and_nothing_else():
    events, saved = [], AdapterSaved("default", 1, "adapter", False)
    with heeding_ctrl_c(events.append) as sink:
        sink(STEP)
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        sink(Notice("saving"))
        sink(saved)
        with pytest.raises(KeyboardInterrupt):
            sink(STEP)
    assert events == [STEP, Notice("saving"), saved, STEP]


def test_ctrl_c_still_interrupts_at_once_and_its_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with heeding_ctrl_c(lambda event: None), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_where_ctrl_c_is_ignored_or_handled_otherwise_it_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeding_ctrl_c(print) as sink:
            assert sink is print
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
