"""The training of a call while it runs, and what is done between its steps."""

from dataclasses import replace

from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.models.adaptation import saved_bytes
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.training.checkpoint import CheckpointFiles, Checkpoints, RunState
from sebp_edge.engine.training.recovery import Breaks
from sebp_edge.engine.training.run import Task, TrainingRun
from sebp_edge.events import Event
from sebp_edge.run.assessment import Assessor
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.version_texts import VersionTexts


class LiveTraining:
    """The training of a call. Between its steps, it writes checkpoints, ends if it was stopped, and gives way.

    Args:
        files: where checkpoints are written; None to write none.

    Attributes:
        run: the trainings and their tests; None until `begin`, and after `end`.
        assessor: tests and assesses it beside earlier versions; None like `run`, and until it is needed.
        texts: what its version knows of its texts.
    """

    def __init__(self, call: ModelCall, files: CheckpointFiles | None):
        self._call, self._files = call, files
        self.run: TrainingRun | None = None
        self.assessor: Assessor | None = None
        self.texts = VersionTexts()

    def begin(self, base: BaseModel, task: Task, guard: MemoryGuard, state: RunState | None) -> None:
        """Begins the trainings, or goes on from a state of them."""
        call, giving_way = self._call, self._call.giving_way
        self._checkpoints = Checkpoints(self._files, call.signal, call.job, self)
        breaks = Breaks(self.check, giving_way.rest, self._checkpoints.due)
        self.run = TrainingRun(base, task, guard, self.notify, call.job.clock, state, breaks)
        # The weights, two moments, and the best state.
        self._checkpoints.begin(4 * saved_bytes(base, task.recipe))

    def notify(self, event: Event) -> None:
        """Sends an event of the training; see `check`."""
        self._call.job(event)
        self.check()

    def check(self) -> None:
        """Writes a checkpoint if that is due; ends the call if it was stopped or paused; gives way to others."""
        giving_way = self._call.giving_way
        self._checkpoints.check()
        if self.is_between_steps:
            giving_way.wait(may_free=not self._checkpoints.has_failed)
        giving_way.rest()
        self._call.job.tick()

    def leave_checkpoints(self) -> None:
        """Writes no more checkpoints, since the version is saved; a pause ends what follows."""
        self._checkpoints.end()

    def end(self) -> None:
        """Frees what the run holds; it refers to this object, so that its memory would stay otherwise."""
        self.run = self.assessor = self._checkpoints = None

    @property
    def is_between_steps(self) -> bool:
        """Whether the run has a state to write."""
        return self.run.is_between_steps

    @property
    def is_waited_for(self) -> bool:
        """Whether other programs are to go first."""
        return self._call.giving_way.is_due()

    @property
    def state(self) -> RunState | None:
        """How far the run is, with how much of the whole call is done; None if its checkpoint is to stay."""
        state = self.run.state
        return state and replace(state, share=self._call.job.fraction)
