"""All errors that the SDK raises on purpose: a message of one sentence, a code that never changes, and the exit code.

No message contains a user's text; paths appear only if the user gave them.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "AdapterError",
    "BaseModelMismatch",
    "BudgetExceeded",
    "BusyError",
    "CannotCapture",
    "ClosedError",
    "ExportError",
    "Interrupted",
    "JobError",
    "MachineError",
    "ModelAccessError",
    "ModelError",
    "ModelOfflineError",
    "NonFiniteLoss",
    "OptionError",
    "OwnerUnknown",
    "Paused",
    "RecipeError",
    "SebpEdgeError",
    "SparsityError",
    "StorageError",
    "TextsChanged",
    "TextsError",
    "TrainingStopped",
]


class SebpEdgeError(Exception):
    """Base class of all deliberate errors. `str(error)` says what was got, what was expected and what to do.

    Attributes:
        code: the name of the kind of error in messages; never changes.
        hint: what an app can do or offer after any error of this kind.
        retry: whether the same call can succeed later, for instance when the network is back.
        exit_code: the exit code of the command line.
    """

    code: ClassVar[str] = "error"
    hint: ClassVar[str] = "Show the message to the user."
    retry: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def to_dict(self) -> dict:
        """Returns the error as JSON-ready values: the last line of a command that failed with `--json`."""
        return {
            "event": "error",
            "error": type(self).__name__,
            "code": self.code,
            "message": str(self),
            "hint": self.hint,
            "retry": self.retry,
            "exit_code": self.exit_code,
        }


class OptionError(SebpEdgeError):
    """An argument or option has an invalid value, or does not go with another one."""

    code = "invalid_option"
    hint = "Correct the option or argument that the message names."
    exit_code = 2


class TextsError(SebpEdgeError):
    """The given texts cannot be used: there is no such path, nothing readable, or too little."""

    code = "texts"
    hint = "Let the user choose other texts."


class OwnerUnknown(TextsError):
    """It was not said whose words in chats are to be learnt.

    Attributes:
        reading: what was read, with its `authors`; give it as the texts of the next call, with `me`.
    """

    code = "owner_unknown"
    hint = "Ask the user which of the people in the chats they are, and pass that as `me`."

    def __init__(self, message: str, reading):
        super().__init__(message)
        self.reading = reading


class TextsChanged(TextsError):
    """Documents of a job have changed or are gone, so that it can only go on without them, or start over.

    Attributes:
        changed: the names of documents that are there now and that the job does not know.
        missing: how many documents of the job are not there as they were.
    """

    code = "texts_changed"
    hint = "Ask the user whether to go on without these documents, or to start over."

    def __init__(self, message: str, changed: tuple[str, ...], missing: int):
        super().__init__(message)
        self.changed, self.missing = changed, missing


class RecipeError(SebpEdgeError):
    """A recipe is unknown, or has an unknown key or an invalid value."""

    code = "recipe"
    hint = "Use a bundled recipe, or correct the file."


class ModelError(SebpEdgeError):
    """The base model is not available or not usable."""

    code = "model"
    hint = "Let the user choose another model."


class ModelAccessError(ModelError):
    """The Hub refuses this model: it is gated, or does not exist."""

    code = "model_access"
    hint = "Let the user accept the model's terms on the Hub, or choose another model."


class ModelOfflineError(ModelError):
    """The model is not on this machine, and the Hub cannot or must not be reached."""

    code = "model_offline"
    hint = "Connect to the network, or use a model that is on this machine."
    retry = True


class MachineError(SebpEdgeError):
    """This machine cannot do what was asked, because of its memory or its device."""

    code = "machine"
    hint = "Choose a smaller model or a shorter context, or close other programs."
    retry = True


class BusyError(SebpEdgeError):
    """A Personalizer was called while another call of it is running."""

    code = "busy"
    hint = "Wait for the call that is running, or stop it."
    retry = True


class ClosedError(SebpEdgeError):
    """A Personalizer was called after its `close`."""

    code = "closed"
    hint = "Make a new Personalizer."


class AdapterError(SebpEdgeError):
    """An adapter is unknown or damaged, or its name is invalid."""

    code = "adapter"
    hint = "List the adapters, and use one of them or another version."


class BaseModelMismatch(AdapterError):
    """The adapter was made for another base model."""

    code = "base_model_mismatch"
    hint = "Use the model that the adapter was made for, or adapt again."


class JobError(SebpEdgeError):
    """A job is unknown, damaged or running elsewhere, or cannot go on as it was begun."""

    code = "job"
    hint = "List the jobs, or start over."


class ExportError(SebpEdgeError):
    """An adapter cannot be written in a format, or another program reads what was written otherwise."""

    code = "export"
    hint = "Choose another format or quantisation."


class StorageError(SebpEdgeError):
    """Something could not be read or written; what existed before is untouched."""

    code = "storage"
    hint = "Free disk space or permit access to the folder."
    retry = True


class SparsityError(SebpEdgeError):
    """The sparse backward pass cannot handle this batch or model exactly."""

    code = "sparsity"
    hint = "Use the dense model."


class CannotCapture(SebpEdgeError):
    """A function ran, but does something that a CUDA graph cannot capture, such as synchronising with the GPU.

    Attributes:
        reason: what torch says, in one line.
    """

    code = "cannot_capture"
    hint = "Train without CUDA graphs."

    def __init__(self, reason: str):
        cause = reason.rstrip(".")
        super().__init__(
            f"A CUDA graph cannot capture this model: {cause}. Avoid that in the model's code, or train without graphs."
        )
        self.reason = reason


class TrainingStopped(SebpEdgeError):
    """A training ended early.

    Attributes:
        name, version: the name and version of the adapter that was saved; None if none was saved in the store.
    """

    code = "training_stopped"
    hint = "Look at the saved version, if there is one."

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None):
        super().__init__(message)
        self.name, self.version = name, version

    def to_dict(self) -> dict:
        """Returns the error as JSON-ready values, with the name and version of what was saved."""
        return super().to_dict() | {"name": self.name, "version": self.version}


class NonFiniteLoss(TrainingStopped):
    """The loss became NaN or infinite."""

    code = "non_finite_loss"
    hint = "Lower the learning rate."


class BudgetExceeded(TrainingStopped):
    """The process uses more memory than its budget."""

    code = "budget_exceeded"
    hint = "Raise the memory budget, or close other programs."
    retry = True


class Paused(TrainingStopped):
    """The app paused the call; `Personalizer.resume` goes on with it.

    Attributes:
        job: the id of its job.
    """

    code = "paused"
    hint = "Resume the job when the user wants to go on."
    retry = True
    exit_code = 130

    def __init__(self, message: str, *, job: str):
        super().__init__(message)
        self.job = job


class Interrupted(TrainingStopped):
    """The user or the app interrupted the call.

    Attributes:
        text: what `generate` had written so far; "" for all other calls.
    """

    code = "interrupted"
    hint = "Call again when the user wants to go on."
    retry = True
    exit_code = 130

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None, text: str = ""):
        super().__init__(message, name=name, version=version)
        self.text = text


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the closest known word, or all known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}."
