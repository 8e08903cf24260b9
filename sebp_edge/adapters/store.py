"""Adapters on disk: named, versioned, written whole or not at all, readable by their owner only.

    <data folder>/adapters/<name>/active        the number of the version in use
    <data folder>/adapters/<name>/<version>/    adapter_model.safetensors, adapter_config.json (PEFT's layout),
                                                sebp_edge.json (the record), README.md

A version is written into a temporary folder, flushed to the disk, and renamed. Nothing in it holds a user's text or a
path of theirs.
"""

import dataclasses
import errno
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

import sebp_edge
from sebp_edge.errors import AdapterError, suggest
from sebp_edge.files import flush, storage_errors, write_whole

if TYPE_CHECKING:  # listing adapters needs no torch
    from sebp_edge.models.adaptation import Adaptation

RECORD = "sebp_edge.json"
_ACTIVE = "active"
# Windows keeps some names for devices, whatever follows their first dot.
_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """What is known about an adapter: counts, losses and settings.

    Attributes:
        base_model: the base model's public name; model: what to ask for to load it again.
        fingerprint: of the base model's weights.
        recipe: the recipe's values.
        chat: whether prompts are put into the model's chat template, as most of its documents were; None in records of
            older versions, where the recipe's chat_template says so.
        heldout_loss_before, heldout_loss_after: nats per token on the judge's documents; None if it was never judged.
    """

    base_model: str
    model: str
    fingerprint: str
    recipe: dict
    documents: int
    examples: int
    tokens: int
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    seed: int
    chat: bool | None = None
    created: str = dataclasses.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    sebp_edge: str = sebp_edge.__version__

    @property
    def takes_chats(self) -> bool:
        """Whether prompts are put into the model's chat template."""
        return self.recipe.get("chat_template", False) if self.chat is None else self.chat

    @classmethod
    def read(cls, folder: Path) -> "AdapterRecord":
        """The record in an adapter's folder.

        Raises:
            AdapterError: there is none, or it is damaged.
        """
        try:
            values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            known = {field.name for field in dataclasses.fields(cls)}
            record = cls(**{key: value for key, value in values.items() if key in known})
            if not isinstance(record.recipe, dict) or not isinstance(record.base_model, str):
                raise TypeError
            return record
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
            raise AdapterError(
                f"{str(folder)!r} holds no adapter of sebp-edge: {RECORD} cannot be read{reason}."
            ) from error


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter on disk. `name` and `version` are None for one saved outside the store."""

    path: Path
    record: AdapterRecord
    name: str | None = None
    version: int | None = None
    active: bool = False


class AdapterStore:
    """The adapters of one folder; by default the OS's data folder for this program."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder or platformdirs.user_data_path("sebp-edge", appauthor=False)) / "adapters"

    def names(self) -> list[str]:
        """All adapters' names."""
        with storage_errors("No adapter can be read in", self.folder, ""):
            if not self.folder.is_dir():
                return []
            return sorted(path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and _versions(path))

    def versions(self, name: str) -> list[int]:
        """The numbers of all versions of one adapter, oldest first.

        Raises:
            AdapterError: there is none of that name.
        """
        return _versions(self._named(name))

    def active_version(self, name: str) -> int | None:
        """The version in use, or None."""
        try:
            return int((self.folder / check_name(name) / _ACTIVE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def open(self, name: str, version: int | None = None) -> SavedAdapter:
        """One version of an adapter, by default the active one.

        Raises:
            AdapterError: no such name or version, or none is active.
        """
        folder, active = self._named(name), self.active_version(name)
        version = active if version is None else version
        if version is None:
            raise AdapterError(f"No version of the adapter {name!r} is active; choose one of {_versions(folder)}.")
        path = _version_folder(folder, version)
        return SavedAdapter(path, AdapterRecord.read(path), name, version, version == active)

    def find(self, adapter: str | Path, version: int | None = None) -> tuple[Path, AdapterRecord]:
        """The folder and the record of an adapter, given by its name in this store or by its folder.

        Raises:
            AdapterError: there is no such adapter.
        """
        if isinstance(adapter, str) and not re.search(r"[/\\]", adapter):
            saved = self.open(adapter, version)
            return saved.path, saved.record
        try:
            folder = Path(adapter).expanduser()
            there = folder.is_dir()
        except (OSError, RuntimeError):
            there = False
        if not there:
            raise AdapterError(f"There is no adapter folder {str(adapter)!r}; check the path.")
        return folder, AdapterRecord.read(folder)

    def check_writable(self, name: str, out: Path | None) -> None:
        """Finds out before any work is done whether an adapter can be saved.

        Raises:
            AdapterError: the name is no good, or something is at `out` already.
            StorageError: the disk does not let us.
        """
        check_name(name)
        if out is not None and out.exists():
            raise AdapterError(f"{str(out)!r} exists already; choose a new folder, so that nothing is overwritten.")
        parent = out.absolute().parent if out else self.folder
        with storage_errors("Nothing can be saved in", parent):
            _make_private(parent)
            own = self.folder / name
            parent = own if out is None and own.exists() else parent
        with storage_errors("Nothing can be saved in", parent):
            shutil.rmtree(tempfile.mkdtemp(prefix=".check-", dir=parent))

    def save(self, adaptation: "Adaptation", record: AdapterRecord, name: str, *, activate: bool) -> SavedAdapter:
        """Saves a new version of the adapter `name`; with `activate`, it becomes the one in use."""
        folder = self.folder / check_name(name)
        with storage_errors("Nothing was saved in", folder):
            _make_private(self.folder)
            _make_private(folder)
            version = 1 + max(_versions(folder), default=0)
            # Another process may take the number meanwhile: renaming onto its folder fails, and the next one is tried.
            while not _write_whole(adaptation, record, folder / str(version)):
                version += 1
            if activate:
                write_whole(folder / _ACTIVE, str(version))
        return SavedAdapter(folder / str(version), record, name, version, activate)

    def save_to(self, adaptation: "Adaptation", record: AdapterRecord, out: Path) -> SavedAdapter:
        """Saves an adapter into a new folder of the user's choice, outside the store."""
        out = out.absolute()
        with storage_errors("Nothing was saved in", out):
            if not _write_whole(adaptation, record, out):
                raise AdapterError(f"{str(out)!r} exists already; nothing was overwritten.")
        return SavedAdapter(out, record)

    def remove(self, name: str, version: int | None = None) -> None:
        """Deletes one version, or the whole adapter."""
        folder = self._named(name)
        path = folder if version is None else _version_folder(folder, version)
        # Renamed first, so that an interruption never leaves half an adapter under its name; in place, since a full
        # disk has no room for another folder.
        doomed = path.with_name(f".removed-{path.name}")
        with storage_errors("Nothing was deleted in", path, ""):
            if version is not None and version == self.active_version(name):
                (folder / _ACTIVE).unlink()
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        with storage_errors("The adapter is gone from the list, but files of it are left in", doomed, "; delete them"):
            shutil.rmtree(doomed)
            if version is not None and not _versions(folder):
                shutil.rmtree(folder)

    def _named(self, name: str) -> Path:
        check_name(name)
        if name not in self.names():
            known = f"; {suggest(name, self.names())}" if self.names() else ", and no other either."
            raise AdapterError(f"There is no adapter {name!r}{known}")
        return self.folder / name


def check_name(name: str) -> str:
    """Returns `name` if it can be an adapter's, else raises an AdapterError."""
    if not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise AdapterError(
            f"{name!r} cannot be an adapter's name; use up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, and no name that Windows keeps for devices, such as con or nul."
        )
    return name


def _version_folder(folder: Path, version: int) -> Path:
    if version not in _versions(folder):
        raise AdapterError(f"The adapter {folder.name!r} has no version {version}; it has {_versions(folder)}.")
    return folder / str(version)


def _versions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


# ------------------------------------------------------------------------------------------------------------ writing


def _write_whole(adaptation: "Adaptation", record: AdapterRecord, target: Path) -> bool:
    """Writes an adapter's folder in one stroke; False if something is at `target` already."""
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=target.parent))
    try:
        adaptation.save(temporary)
        (temporary / RECORD).write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(_model_card(record), encoding="utf-8")
        for path in temporary.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
            flush(path)
        flush(temporary)
        if target.exists():
            return False
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        flush(target.parent)
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _model_card(record: AdapterRecord) -> str:
    """The folder's README.md: what it is and how to load it; no text, no path."""
    judged = ""
    if record.heldout_loss_before is not None and record.heldout_loss_after is not None:
        judged = (
            f"\nTrainings like this one took the loss on documents they had not seen from "
            f"{record.heldout_loss_before:.3f} to {record.heldout_loss_after:.3f} nats per token.\n"
        )
    kind = "LoRA adapter" if record.recipe["method"] == "lora" else "fully fine-tuned model"
    return f"""---
base_model: {record.base_model}
library_name: {"peft" if record.recipe["method"] == "lora" else "transformers"}
---
# A {kind} for {record.base_model}

Made by sebp-edge {record.sebp_edge} on its owner's machine from {record.documents} documents
({record.tokens} tokens), with the recipe "{record.recipe["name"]}".
{judged}
The texts it learnt from are not in this folder, but a model can repeat what it has learnt: treat it as you treat them.
"""
