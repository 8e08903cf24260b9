"""Puts typed placeholders in the place of what differs between two runs of the same code, and of nothing else."""

import json
import re
import tempfile
from pathlib import Path

from materials import sentences
from recorder import MEASURED, MEMORY

TOLD = Path(__file__).parent / "told"
NOTES = [*sentences(24), "The samovar stands in the attic beside the canoe."]
# By placeholder, the keys of JSON whose values it stands for. None and false stay: that something is unknown is a fact.
KEYS = {
    "<time>": {"time", "created", "updated", "begun", "forgotten"},
    "<seconds>": {"seconds", "seconds_left", "training_seconds", "phases"},
    "<milliseconds>": {"forward_ms", "backward_ms", "step_ms"},
    "<rate>": {"tokens_per_second"},
    "<share>": {"progress", "fraction"},  # of the time of a call
    "<bytes>": {*MEMORY, "allocator_peak", "allocator_peak_bytes", "peak_bytes", "memory", "size"},
    "<process>": {"pid", "process"},
    "<count>": {"last_event", "done", "total"},  # of events, and of what is done in a preparation
    "<machine>": {"packages"},
    "<schema>": {"schema_hash", "schema"},  # recorded by itself
}
PLACEHOLDERS = {key: placeholder for placeholder, keys in KEYS.items() for key in keys}
# More keys of a kind of message: what is known of this machine.
OF_MACHINE = {"finding": ("state",)}
_ID = re.compile(r"[0-9a-f]{12}")
# Events that are told every so often: the first of a phase or stage stays.
_OFTEN = {"progress": "phase", "preparing": "stage"}
# What is said if other programs take the processor.
_BUSY = "This machine is busy: "
# Lines for people that are printed every few seconds.
_LINE_OF_PROGRESS = re.compile(rf"step \d+/\d+  .*|[\w ]+: +\d+ %(, .* left)?|note: {_BUSY}.*")
# Temporary folders that are named.
_TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/(sebp-edge-\w+-)\w{{8}}")


class Placeholders:
    """Those of one chapter; ids that were drawn are numbered in the order in which they came.

    Args:
        folders: folders with their placeholders, the innermost first.
    """

    def __init__(self, folders: dict[Path, str]):
        self._texts = {str(folder): placeholder for folder, placeholder in folders.items()}

    def put(self, value, key: str = ""):
        """Returns a value of JSON with placeholders; in texts for folders, ids, times and memory."""
        if key in PLACEHOLDERS and value is not None and value is not False:
            return PLACEHOLDERS[key]
        if isinstance(value, dict):
            # A plan for a GPU that is absent depends on no memory here.
            kept = MEMORY if value.get("gpu") else ()
            found = {name: one if name in kept else self.put(one, name) for name, one in value.items()}
            return found | dict.fromkeys(OF_MACHINE.get(value.get("event"), ()), "<machine>")
        if isinstance(value, list):
            return [self.put(one) for one in value]
        if not isinstance(value, str):
            return value
        if key in ("job", "id") and _ID.fullmatch(value):
            self._texts.setdefault(value, f"<id {len(self._texts)}>")
        for text, placeholder in self._texts.items():
            value = value.replace(text, placeholder)
        return MEASURED.sub("<measured>", _TEMPORARY.sub(r"\1<random>", value))

    def put_in_lines(self, text: str) -> list:
        """Returns what a command printed: lines of JSON as values, other lines as they are."""
        lines = [line for line in text.splitlines() if not _LINE_OF_PROGRESS.fullmatch(line)]
        return self.put(without_repeats([json.loads(line) if line.startswith("{") else line for line in lines]))


def without_repeats(events: list, *, steps: bool = False) -> list:
    """Returns events without those about progress that begin no phase and no stage.

    Args:
        steps: whether of steps in a row only the first stays, by its name.
    """
    last, kept = {}, []
    for event in events:
        kind = event.get("event") if isinstance(event, dict) else None
        about = event[_OFTEN[kind]] if kind in _OFTEN else None
        if kind == "notice" and event["message"].startswith(_BUSY):
            continue
        if kind in _OFTEN and last.get(kind) == about:
            continue
        last[kind] = about
        if steps and kind == "step":
            event = {"event": "step"}
            if kept[-1:] == [event]:
                continue
        kept.append(event)
    return kept
