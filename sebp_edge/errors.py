"""Every error the SDK raises on purpose: one clear sentence, and the exit code the command line ends with.

    SebpEdgeError
      TextsError            what was given as texts cannot be used (no such path, nothing readable, too little)
      RecipeError           unknown recipe, unknown key, wrong type
      ModelError            the base model cannot be had or used
        ModelAccessError    the Hub refuses it: gated, or it does not exist
        ModelOfflineError   it is not cached and the Hub may not or cannot be reached
      MachineError          this machine cannot do it (memory, device)
      AdapterError          unknown or unusable adapter, bad name
        BaseModelMismatch   the adapter was made for another base model
      StorageError          the disk is full, read-only or not ours
      SparsityError         the batch cannot be handled exactly by the sparse backward
      TrainingStopped       training ended early; what was saved is named
        NonFiniteLoss       the loss became NaN or infinite
        BudgetExceeded      the process holds more than its memory budget
        Interrupted         the user pressed Ctrl-C, or the app called stop()

No message holds a user's text; paths appear only where the user gave them.
"""

import difflib
from collections.abc import Iterable


class SebpEdgeError(Exception):
    """Base of all deliberate errors. `str(error)` is one sentence: what was got, what was expected, what to do."""

    exit_code = 1


class TextsError(SebpEdgeError):
    """The given texts cannot be used."""


class RecipeError(SebpEdgeError):
    """A recipe is unknown or holds something it should not."""


class ModelError(SebpEdgeError):
    """The base model cannot be had or used."""


class ModelAccessError(ModelError):
    """The Hub does not hand out this model: it is gated, or it does not exist."""


class ModelOfflineError(ModelError):
    """The model is not on this machine, and the Hub may not or cannot be reached."""


class MachineError(SebpEdgeError):
    """This machine cannot do what was asked."""


class BusyError(SebpEdgeError):
    """A Personalizer was asked for something while another call of it is at work."""


class AdapterError(SebpEdgeError):
    """An adapter is unknown, damaged, or badly named."""


class BaseModelMismatch(AdapterError):
    """The adapter was made for another base model."""


class StorageError(SebpEdgeError):
    """Something could not be written; what existed before is untouched."""


class SparsityError(SebpEdgeError):
    """The sparse backward cannot handle this batch exactly."""


class TrainingStopped(SebpEdgeError):
    """A training ended early.

    Attributes:
        name, version: of the adapter that was saved, which is not active; None if nothing was saved.
    """

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None):
        super().__init__(message)
        self.name, self.version = name, version


class NonFiniteLoss(TrainingStopped):
    """The loss became NaN or infinite."""


class BudgetExceeded(TrainingStopped):
    """The process holds more memory than it may."""


class Interrupted(TrainingStopped):
    """The user, or the app, interrupted the call.

    Attributes:
        text: what `generate` had written; "" for every other call.
    """

    exit_code = 130

    def __init__(self, message: str, *, name: str | None = None, version: int | None = None, text: str = ""):
        super().__init__(message, name=name, version=version)
        self.text = text


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
