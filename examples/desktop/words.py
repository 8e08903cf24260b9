"""Sizes, times, phases and errors in plain words."""

from sebp_edge.serve.client import ServerError

# By the beginning of a phase's name.
_PHASES = {
    "reading": "Reading your notes",
    "comparing": "Looking for notes that are alike",
    "tokenising": "Taking the notes apart",
    "planning": "Planning within the memory",
    "waiting": "Waiting: on battery, or for other programs",
    "loading": "Loading the model",
    "train": "Learning",
    "fold": "Learning and testing in turns",
    "all documents": "Learning all notes",
    "active": "Testing the version in use",
    "quiz": "Testing with questions",
    "samples": "Writing samples",
    "general": "Testing on other texts",
    "copies": "Looking for copied passages",
    "saving": "Saving",
}
# Errors whose own words are for developers, or need an advice that fits this window.
_SENTENCES = {
    "server_ended": "The part that learns has stopped. Nothing that was saved is lost.",
    "worker_ended": "The model's process has stopped. Nothing that was saved is lost; try again.",
    "killed": "It was interrupted when the window or the computer stopped. Nothing that was saved is lost.",
    "store_in_use": "Another window is open already. Close it, then start again.",
    "busy": "This has to wait until the learning is done or paused.",
    "machine": "This model needs more memory than it may use. Choose a smaller model, or allow more memory.",
    "model_offline": "The model is not on this computer yet. Connect to the internet once, or choose another model.",
    "owner_unknown": "These are chats or mails of several people. This window learns notes; leave their folder out.",
    "cancelled": "It was cancelled.",
    "folder_not_allowed": "This file is outside of the folders that you have chosen. Add its folder under Notes.",
}


def sentence(error: ServerError | dict) -> str:
    """Returns an error as a sentence or two: what happened, and what to do."""
    if isinstance(error, ServerError):
        error = {"code": error.code, "message": str(error), "hint": error.hint}
    if (known := _SENTENCES.get(error.get("code"))) is not None:
        return known
    return error["message"]


def phase(name: str) -> str:
    """Returns what is done now; `name` is that of a progress event."""
    return next((words for start, words in _PHASES.items() if name.startswith(start)), "Getting ready")


def duration(seconds: float) -> str:
    """Returns an approximate time."""
    if seconds < 55:
        return "less than a minute"
    minutes = max(1, round(seconds / 60))
    if minutes < 90:
        return f"about {count(minutes, 'minute')}"
    return f"about {count(round(minutes / 60), 'hour')}"


def percent(share: float) -> str:
    """Returns a share, rounded down: only what is done is 100%."""
    return f"{int(100 * share)}%"


def size(number: float) -> str:
    """Returns a number of bytes in gigabytes."""
    return f"{number / 1e9:.1f} GB"


def count(number: int, thing: str) -> str:
    """Returns "1 note" or "1,234 notes"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
