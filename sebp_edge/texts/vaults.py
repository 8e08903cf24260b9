"""Finds vaults of Obsidian and Logseq and exports of Joplin, and knows which of their folders hold no notes."""

from pathlib import Path
from typing import Literal, NamedTuple

from sebp_edge.basics.files import read_json

# In bytes.
MAX_SETTINGS = 1_000_000
# A file of Joplin's RAW export has an id as its name.
_JOPLINS = "[0-9a-f]" * 32 + ".md"


class Vault(NamedTuple):
    """A folder of notes that a program keeps or exported.

    Attributes:
        app: the program whose syntax the notes have.
        not_notes: folders without notes, as absolute paths, each with the reason to leave it out.
    """

    app: Literal["Obsidian", "Logseq", "Joplin"]
    not_notes: dict[Path, str]


def find_vault(folder: Path) -> Vault | None:
    """Returns the vault that the folder is, or None."""
    folder = folder.absolute()
    try:
        if (folder / ".obsidian").is_dir():
            names = {"Templates", "templates", *_obsidian_templates(folder / ".obsidian")}
            return Vault("Obsidian", {folder / name: "Obsidian's templates" for name in names})
        if (folder / "logseq" / "config.edn").is_file():
            return Vault("Logseq", {folder / "logseq": "Logseq's settings and backups"})
        if (folder / "resources").is_dir() and next(folder.glob(_JOPLINS), None):
            return Vault("Joplin", {folder / "resources": "Joplin's attachments"})
    except OSError:
        pass  # The folder cannot be opened, which its own reader reports.
    return None


def vault_around(folder: Path) -> Vault | None:
    """Returns the innermost vault that the folder is or is in, or None."""
    folder = folder.absolute()
    return next((vault for outer in (folder, *folder.parents) if (vault := find_vault(outer))), None)


def _obsidian_templates(settings: Path) -> set[str]:
    """Returns the folders of templates, as set in Obsidian and in its plugin Templater."""
    places = {"templates.json": "folder", "plugins/templater-obsidian/data.json": "templates_folder"}
    found = {_setting(settings / file, key).strip("/") for file, key in places.items()}
    return {name for name in found if name}


def _setting(file: Path, key: str) -> str:
    """Returns a setting, or "" if it is not set or cannot be read."""
    try:
        value = read_json(file, MAX_SETTINGS).get(key)
    except (OSError, ValueError):
        return ""
    return value if isinstance(value, str) and "\0" not in value else ""
