"""A record and a fake adaptation for tests of the store, and processes that save into one."""

import subprocess
import sys
import textwrap
from pathlib import Path

from sebp_edge import AdapterRecord, Folder
from sebp_edge.store.where import Where

NOWHERE = Where()
# Folders of texts, in two calls.
HERE = Where(
    texts=((Folder("/home/anna/notes", include=("*.md",), exclude=("drafts/",)), Folder("/b")), (Folder("/c"),))
)
RECORD = {
    "base_model": "sebp-edge/tiny",
    "model": "tiny",
    "fingerprint": "abc",
    "recipe": {"name": "notes", "method": "lora"},
    "documents": 12,
    "examples": 13,
    "tokens": 1400,
    "heldout_loss_before": 3.5,
    "heldout_loss_after": 3.1,
    "seed": 0,
}


class FakeAdaptation:
    """Stands in for an adaptation; saves files, one of them in a subfolder."""

    def __init__(self, content=b"weights"):
        self.content = content

    def save(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(self.content)
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").write_bytes(self.content)

    def detach(self) -> None: ...


def save(store, name="mine", *, content=b"weights", activate=True, where=None, **values):
    """Saves a version, whose record has these values; returns it."""
    record = AdapterRecord(**RECORD | values)
    return store.adapter(name).save(FakeAdaptation(content), record, activate=activate, where=where)


# The beginning of a script that saves into the folder argv[1].
SAVE_SCRIPT = """
import os, resource, signal, sys, time
from pathlib import Path
import numpy
from safetensors.numpy import save_file
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.errors import StorageError

class Weights:
    size = 1000
    def save(self, folder):
        save_file({"w": numpy.zeros(self.size)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

record = AdapterRecord(**RECORD)
store = AdapterStore(sys.argv[1])
"""


def process(script, folder, **options):
    script = f"RECORD = {RECORD!r}\n{SAVE_SCRIPT}\n{textwrap.dedent(script)}"
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, **options)


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(store):
    """The store's entries apart from its lock, its salt and the highest numbers."""
    return [path for path in store.folder.iterdir() if path.name not in (".lock", ".numbers", ".salt")]
