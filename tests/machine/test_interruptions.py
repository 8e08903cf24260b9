"""A stop that is asked for, and signals, are raised once, when nothing is lost by it."""

import os
import signal

import pytest

from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopRequested, StopSignal


def test_a_stop_is_raised_only_once_so_that_the_rest_can_be_saved():
    signal, raised = StopSignal(), 0
    signal.set()
    for _ in range(3):
        try:
            signal.check()
        except StopRequested:
            raised += 1
    assert raised == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_apps_handlers_are_restored_and_receive_deferred_signals(number):
    received = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        own = signal.getsignal(number)
        with Interruptions() as interruptions:
            signal.raise_signal(number)
            assert received == [number]  # handled at once, since nothing is interrupted yet
            interruptions.defer()
            signal.raise_signal(number)
            assert received == [number]
            interruptions.deliver()
            interruptions.deliver()
            assert received == [number] * 2
            signal.raise_signal(number)
            assert received == [number] * 2
        assert received == [number] * 3
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
