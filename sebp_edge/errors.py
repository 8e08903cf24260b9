"""All errors that the SDK raises on purpose, each with a message of one sentence and the exit code of the command line.

No message contains a user's text; paths appear only if the user gave them.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "AdapterError",
    "BaseModelMismatch",
    "BudgetExceeded",
    "BusyError",
    "CannotCapture",
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
        exit_code: the exit code of the command line.
    """

    exit_code = 1


class OptionError(SebpEdgeError):
    """An argument or option has an invalid value, or does not go with another one."""

    exit_code = 2


class TextsError(SebpEdgeError):
    """The given texts cannot be used: there is no such path, nothing readable, or too little."""


class OwnerUnknown(TextsError):
    """It was not said whose words in chats are to be learnt.

    Attributes:
        reading: what was read, with its `authors`; give it as the texts of the next call, with `me`.
    """

    def __init__(self, message: str, reading):
        super().__init__(message)
        self.reading = reading


class TextsChanged(TextsError):
    """Documents of a job have changed or are gone, so that it can only go on without them, or start over.

    Attributes:
        changed: the names of documents that are there now and that the job does not know.
        missing: how many documents of the job are not there as they were.
    """

    def __init__(self, message: str, changed: tuple[str, ...], missing: int):
        super().__init__(message)
        self.changed, self.missing = changed, missing


class RecipeError(SebpEdgeError):
    """A recipe is unknown, or has an unknown key or an invalid value."""


class ModelError(SebpEdgeError):
    """The base model is not available or not usable."""


class ModelAccessError(ModelError):
    """The Hub refuses this model: it is gated, or does not exist."""


class ModelOfflineError(ModelError):
    """The model is not on this machine, and the Hub cannot or must not be reached."""


class MachineError(SebpEdgeError):
    """This machine cannot do what was asked, because of its memory or its device."""


class BusyError(SebpEdgeError):
    """A Personalizer was called while another call of it is running."""


class AdapterError(SebpEdgeError):
    """An adapter is unknown or damaged, or its name is invalid."""


class BaseModelMismatch(AdapterError):
    """The adapter was made for another base model."""


class JobError(SebpEdgeError):
    """A job is unknown, damaged or running elsewhere, or cannot go on as it was begun."""


class ExportError(SebpEdgeError):
    """An adapter cannot be written in a format, or another program reads what was written otherwise."""


class StorageError(SebpEdgeError):
    """Something could not be read or written; what existed before is untouched."""


class SparsityError(SebpEdgeError):
    """The sparse backward pass cannot handle this batch or model exactly."""


class CannotCapture(SebpEdgeError):
    """A function ran, but does something that a CUDA graph cannot capture, such as synchronising with the GPU.

    Attributes:
        reason: what torch says, in one line.
    """

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

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None):
        super().__init__(message)
        self.name, self.version = name, version


class NonFiniteLoss(TrainingStopped):
    """The loss became NaN or infinite."""


class BudgetExceeded(TrainingStopped):
    """The process uses more memory than its budget."""


class Paused(TrainingStopped):
    """The app paused the call; `Personalizer.resume` goes on with it.

    Attributes:
        job: the id of its job.
    """

    exit_code = 130

    def __init__(self, message: str, *, job: str):
        super().__init__(message)
        self.job = job


class Interrupted(TrainingStopped):
    """The user or the app interrupted the call.

    Attributes:
        text: what `generate` had written so far; "" for all other calls.
    """

    exit_code = 130

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None, text: str = ""):
        super().__init__(message, name=name, version=version)
        self.text = text


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the closest known word, or all known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}."
