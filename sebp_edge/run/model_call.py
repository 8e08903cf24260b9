"""A call of a Personalizer that may use a model: what it works with, and how it is begun, stopped and paused."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopRequested, StopSignal
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.memory.this_machine import present_target
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.libraries import quiet_libraries
from sebp_edge.engine.models.loading import BaseModel, local_tokenizer
from sebp_edge.errors import BusyError, ClosedError, Interrupted, MachineError, StorageError
from sebp_edge.events import Notice
from sebp_edge.machine import devices
from sebp_edge.machine.crowding import Crowding
from sebp_edge.machine.devices import without_cudnn_attention
from sebp_edge.machine.process import memory_of
from sebp_edge.recipe import Recipe
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions, limited
from sebp_edge.run.giving_way import GivingWay
from sebp_edge.run.model_in_use import AdapterChoice, ModelInUse
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.saved import SavedAdapter


@dataclass(frozen=True)
class ModelCall(Call):
    """What a call works with that may use a model.

    Attributes:
        giving_way: lets other programs go first, if the call is a training.
    """

    interruptions: Interruptions
    in_use: ModelInUse
    giving_way: GivingWay

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self.in_use.device

    def check(self) -> None:
        """Ends the call if it was stopped; waits for other programs; tells the progress if that is due."""
        self.signal.check()
        self.giving_way.wait()
        self.job.tick()

    def conditions(self, absent_gpu: tuple[Target, MemoryBudget] | None = None) -> Conditions:
        """Returns what a training here, or on an absent GPU, is planned for."""
        shape, where = read_shape(self.reference), absent_gpu
        if where is None:
            where = present_target(self.device, self.in_use.loaded_bytes, shape.hidden), self.current_budget()
        return Conditions(shape, local_tokenizer(self.reference), *where)

    def current_budget(self) -> MemoryBudget:
        """Returns what of the budget is free now, without the loaded weights, which a plan includes."""
        return limited(self.budget, devices.free_memory(self.device) + memory_of(self.device).used)

    def load(self, recipe: Recipe | None = None, streamed: int | None = None) -> BaseModel:
        """Loads the base model; see `ModelInUse.load`."""
        self.signal.check()
        return self.in_use.load(
            self.notify, recipe, watch=lambda load: self.job.watch(load, self.check), streamed=streamed
        )

    def load_adapter(self, adapter: str | Path, version: int | None) -> AdapterRecord:
        """Puts a saved adapter on the base model; see `Personalizer.load_adapter`."""
        found = self.store.find(adapter, version)
        self.load()
        self.in_use.load_adapter(found.path, found.record, self.job)
        self.remember_model_of(found)
        return found.record

    @contextmanager
    def generating(self, choice: AdapterChoice, *, once: bool = False) -> Iterator[tuple[BaseModel, Decoder, str]]:
        """Context in which the model has the chosen adapter, later calls too unless `once`: see `ModelInUse`."""
        if choice.is_named:
            owners = self.in_use.owners or (self.in_use.adapter_folder, self.in_use.prompts)
            found = self.store.find(choice.adapter, choice.version)
            if self.in_use.adaptation is None or self.in_use.adapter_folder != found.path:
                self.load_adapter(choice.adapter, choice.version)
            self.in_use.owners = owners if once else None
        elif choice.adapter is not None:
            self.in_use.take_back()
        base = self.load()
        with self.in_use.generating(with_adapter=choice.adapter is not None) as (decoder, rendered_as):
            yield base, decoder, rendered_as

    def remember_model_of(self, found: SavedAdapter) -> None:
        """Remembers where the base model of a saved adapter is, if there is a store."""
        if self.store.folder.is_dir():
            self.remember_model(found.record)

    def remember_model(self, record: AdapterRecord) -> None:
        """Remembers where the base model of an adapter is, if it was given as a folder or a file."""
        if not self.reference.has_path:
            return
        try:
            self.store.remember_model(record.fingerprint, Path(self.reference.location))
        except StorageError as error:
            self.job(Notice(f"{error} The path of the base model is not remembered."))

    def make_guard(self, plan: Plan | None = None, predicted: int | None = None) -> MemoryGuard:
        """Returns a guard for the budget of a plan, else for the memory budget, else for all free memory.

        Args:
            predicted: the peak that an earlier plan predicted, without one.
        """
        if plan is not None:
            return MemoryGuard(self.device, plan.budget, plan.chosen.peak)
        return MemoryGuard(self.device, self.budget.size if self.budget else None, predicted)

    @contextmanager
    def base_model_alone(self, when: str) -> Iterator[None]:
        """Context without the adapter in use. If memory runs out, frees it and says `when`."""
        handled = sys.exception()
        self.in_use.detach_adapter()
        try:
            yield
        except BaseException as error:
            if not devices.ran_out_of_memory(error):
                raise
            devices.clear_frames(error, handled)
            devices.release_memory(self.device)
            raise MachineError(
                f"Out of {self.device.type.upper()} memory {when}; choose a smaller model or a shorter context."
            ) from error
        finally:
            self.in_use.restore_adapter(self.job)


# What makes a call, from what ends it.
MakeCall = Callable[[StopSignal, Interruptions], ModelCall]


class OneCall:
    """Begins one call at a time, until it is closed; `stop` and `pause` may be called from any thread."""

    def __init__(self):
        self._lock, self._is_closed = threading.Lock(), False
        self._signal = StopSignal()  # of the running call, or of the last one
        self._crowding = Crowding()

    @contextmanager
    def begin(self, make: MakeCall, stop_when: threading.Event | None = None) -> Iterator[ModelCall]:
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
    def beside(self, make: MakeCall, stop_when: threading.Event | None = None) -> Iterator[ModelCall]:
        """Context of a call that leaves the model alone, so that another one may run.

        Raises:
            ClosedError, Interrupted: see `begin`.
        """
        self._refuse_closed()
        with _stopped(), quiet_libraries():
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
