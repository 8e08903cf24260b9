"""The one call that may use a Personalizer's model: begins and ends it, and lets other threads stop or pause it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopRequested, StopSignal
from sebp_edge.engine.models.libraries import quiet_libraries
from sebp_edge.errors import BusyError, ClosedError, Interrupted
from sebp_edge.machine.crowding import Crowding
from sebp_edge.machine.devices import without_cudnn_attention
from sebp_edge.run.call import Call

# What makes a call, from what ends it.
MakeCall = Callable[[StopSignal, Interruptions], Call]


class OneCall:
    """Begins one call at a time, until it is closed; `stop` and `pause` may be called from any thread."""

    def __init__(self):
        self._lock, self._is_closed = threading.Lock(), False
        self._signal = StopSignal()  # of the running call, or of the last one
        self._crowding = Crowding()

    @contextmanager
    def begin(self, make: MakeCall, stop_when: threading.Event | None = None) -> Iterator[Call]:
        """Context of a call, which can be stopped and in which no other begins.

        Raises:
            BusyError, ClosedError: another call is running, or none may begin any more.
            Interrupted: the call was stopped.
        """
        with Interruptions() as interruptions, self._alone():
            self._refuse_closed()
            with _stopped():
                self._signal = StopSignal(stop_when)
                self._signal.check()
                call = make(self._signal, interruptions)
                limited, watched = call.giving_way.limited_threads(), self._crowding.watched(call.device)
                with quiet_libraries(), without_cudnn_attention(), limited, watched, call.job:
                    yield call
                    call.job.finish()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Context in which no call runs, and after which none begins."""
        with self._alone():
            self._is_closed = True
            yield

    @contextmanager
    def beside(self, make: MakeCall, stop_when: threading.Event | None = None) -> Iterator[Call]:
        """Context of a call that leaves the model alone, so that another one may run.

        Raises:
            ClosedError, Interrupted: see `begin`.
        """
        self._refuse_closed()
        with _stopped():
            yield make(StopSignal(stop_when), Interruptions())

    def stop(self) -> None:
        """Stops the running call, if any."""
        self._signal.set()

    def pause(self) -> bool:
        """Pauses the running call; returns False if there is none that can be paused."""
        return self._signal.pause()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            advice = "wait for it, end it with stop(), or use another Personalizer"
            raise BusyError(f"This Personalizer is running another call; {advice}.")
        try:
            yield
        finally:
            self._lock.release()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("This Personalizer was closed; make a new one.")


@contextmanager
def _stopped() -> Iterator[None]:
    """Context in which a stop is an error for the app."""
    try:
        yield
    except StopRequested as request:
        raise Interrupted("Stopped; nothing was changed.") from request
