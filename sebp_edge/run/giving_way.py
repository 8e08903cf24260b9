"""Gives way to other programs during a training: waits while they need the machine, and leaves the GPU to them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from sebp_edge.basics.stopping import PauseRequested, StopSignal
from sebp_edge.basics.units import gigabytes
from sebp_edge.errors import Interrupted, MachineError, Paused
from sebp_edge.events import Notice, Waiting
from sebp_edge.machine import devices, process
from sebp_edge.machine.politeness import GpuUse, Politeness, is_on_battery
from sebp_edge.run.job import JobSink

# How often it is looked whether there is a reason to wait, and whether a wait is over or was ended.
LOOK_SECONDS, POLL_SECONDS = 1.0, 0.1
# How often it is looked during a rest whether something else is to be done.
REST_SECONDS = 0.02
# A wait that takes longer frees the memory of the model.
HELD_SECONDS = 300.0
# Without a checkpoint of what would be lost, nothing is freed; it is tried again after so many seconds.
RETRY_SECONDS = 60.0
# Memory that is left to other programs: a share of all, within limits in bytes.
RESERVE, MIN_RESERVE, MAX_RESERVE = 0.05, 256 * 2**20, 2 * 2**30
# A call on a GPU computes only little on the CPU. Each time, torch wakes a thread for every core that it sees; in a
# container that lends fewer, all of them, the main one included, then wait until they are scheduled.
THREADS_BESIDE_GPU = 4
# What precedes this is not taken for work of the GPU, such as reading texts.
_LONGEST_WORK = 5.0

POWER, MEMORY, GPU = "power", "memory", "gpu"


class GivingWay:
    """How one call gives way to other programs.

    Args:
        job: receives the events; its clock stands still during a wait.
        while_waiting: called several times a second during a wait or a rest.

    Attributes:
        frees: whether `wait` has requested a pause.
    """

    def __init__(
        self,
        politeness: Politeness,
        device: torch.device,
        job: JobSink,
        signal: StopSignal,
        while_waiting: Callable[[], None] = lambda: None,
    ):
        self.politeness, self._device, self._job, self._signal = politeness, device, job, signal
        self._while_waiting = while_waiting
        self._rooms: list[Room] = []
        self._gpu: GpuUse | None = None
        self._is_on = self.frees = False
        self._look_at, self._reason, self._rested = 0.0, None, time.perf_counter()

    @contextmanager
    def limited_threads(self) -> Iterator[None]:
        """Context in which the call computes with the threads that it may use."""
        threads = self.politeness.threads
        if threads is None and self._device.type == "cuda":
            threads = min(torch.get_num_threads(), THREADS_BESIDE_GPU)
        with devices.limited_threads(threads):
            yield

    @property
    def recorded(self) -> Politeness:
        """What a training's job records: with the threads that it began with on the CPU, as their number rounds."""
        if self._device.type != "cpu":
            return self.politeness
        return replace(self.politeness, threads=torch.get_num_threads())

    def wait_from_now_on(self) -> None:
        """Waits for others from now on, if the call is to."""
        self._is_on = self.politeness.waits
        if self._is_on:
            self._watch()

    def is_due(self) -> bool:
        """Whether the call is to wait where it can."""
        return self._look() is not None

    def wait(self, *, may_free: bool = True) -> None:
        """Waits while there is a reason. To free memory, requests a pause of the call, after which `wait_for` waits.

        Args:
            may_free: whether all that the call would lose by a pause is saved.

        Raises:
            StopRequested, PauseRequested: see `StopSignal.check`.
        """
        if not self.is_due():
            return
        free_at, told = time.monotonic() + HELD_SECONDS, None
        with self._job.standing_still():
            while (reason := self._look()) is not None:
                frees = reason == MEMORY or time.monotonic() >= free_at
                if frees and may_free and self._signal.pause():
                    self.frees = True
                elif frees and reason == MEMORY:
                    self._reason, self._look_at = None, time.monotonic() + RETRY_SECONDS
                    return
                else:
                    told = self._tell(reason, told, holds_memory=True)
                self._sleep()

    def wait_for(self, paused: Paused) -> None:
        """Waits, after a pause that `wait` requested, until the call can go on.

        Raises:
            Paused: another pause was requested meanwhile.
            Interrupted: the call was stopped.
        """
        self.frees, told = False, None
        self._signal.renew()
        try:
            with self._job.standing_still():
                while (reason := self._look()) is not None:
                    told = self._tell(reason, told, holds_memory=False)
                    self._sleep()
        except PauseRequested:
            raise paused from None
        except KeyboardInterrupt as stop:
            raise Interrupted(f"Interrupted. {paused}") from stop
        finally:
            self._signal.can_pause = False

    def rest(self) -> None:
        """Waits for the GPU's work since the last call, then leaves the GPU to others for their share of the time.

        Requests are answered during the rest; their time counts as work and makes the rest longer.
        """
        share = self.politeness.gpu_share / 100
        if share == 1:
            return
        owed = 1 / share - 1
        until = self._work_since(self._rested) * owed + time.perf_counter()
        while (left := until - time.perf_counter()) > 0 and not self._signal.is_requested:
            time.sleep(min(left, REST_SECONDS))
            begin = time.perf_counter()
            self._while_waiting()
            until = until - begin + self._work_since(begin) * owed + time.perf_counter()
        self._rested = time.perf_counter()

    def _work_since(self, begin: float) -> float:
        """Waits for the GPU; returns the seconds since then."""
        devices.synchronize(self._device)
        return min(time.perf_counter() - begin, _LONGEST_WORK)

    def _watch(self) -> None:
        """Begins to watch the memory, and the GPU if that is possible."""
        if self._device.type != "cpu" and self._gpu is None:
            try:
                if self._device.type != "cuda":
                    raise MachineError("This system does not tell what uses the GPU.")
                self._gpu = GpuUse(str(torch.cuda.get_device_properties(self._device).uuid))
            except MachineError as error:
                self._job(Notice(f"{error} The training does not wait for programs that use it."))
        self._rooms = [Room(torch.device("cpu"))]
        if self._device.type == "cuda":
            self._rooms.append(Room(self._device))

    def _look(self) -> str | None:
        """Returns what it waits for; None if it does not."""
        if self._is_on and time.monotonic() >= self._look_at:
            self._look_at, self._reason = time.monotonic() + LOOK_SECONDS, self._find_reason()
        return self._reason

    def _find_reason(self) -> str | None:
        if is_on_battery():
            return POWER
        # All are looked at, since each remembers what it has seen.
        short = [room.lacks() for room in self._rooms]
        if any(short) and self._signal.can_pause:
            return MEMORY
        return GPU if self._gpu is not None and self._gpu.is_taken else None

    def _tell(self, reason: str, told: str | None, *, holds_memory: bool) -> str:
        if reason != told:
            kept = "" if holds_memory else ", without its model in memory"
            self._job(Waiting(reason, holds_memory, f"The training waits{kept}: {self._describe(reason)}."))
        return reason

    def _describe(self, reason: str) -> str:
        if reason == POWER:
            return "this machine runs on battery power"
        if reason == GPU:
            return "another program uses the GPU"
        return (
            f"other programs need memory, and {gigabytes(max(room.lacks() for room in self._rooms))} more must be free"
        )

    def _sleep(self) -> None:
        self._signal.check()
        self._while_waiting()
        time.sleep(POLL_SECONDS)


class Room:
    """The memory that other programs leave on a device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._reserve = max(MIN_RESERVE, min(MAX_RESERVE, int(RESERVE * devices.total_memory(device))))
        self._needed = self._most = 0

    def lacks(self) -> int:
        """Returns the bytes that others must free so that there is enough for what this process has used, and for them.

        0 as well if others do not use more than when there was enough: then this process itself has taken too much.
        """
        own = process.held(self._device)
        left, self._needed = devices.free_memory(self._device) + own, max(self._needed, own)
        lacking = self._needed + self._reserve - left
        if lacking <= 0:
            self._most = max(self._most, left)
            return 0
        return lacking if not self._most or left < self._most - self._reserve else 0
