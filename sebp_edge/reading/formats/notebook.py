"""Reads Jupyter notebooks: their prose, and their code as blocks of code; no outputs."""

import json
from pathlib import Path

from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.formats.notes import Seen, comments_not_read, visible_text
from sebp_edge.values.documents import NotRead, Unreadable, unix_newlines


def read_notebook(path: Path) -> list[str | NotRead]:
    """Returns the text of a notebook, and what was not read."""
    try:
        notebook = json.loads(decode(path))
    except (ValueError, RecursionError) as error:
        raise Unreadable("not a valid notebook (not JSON)") from error
    language = _language(notebook)
    texts = [_text(cell, language) for cell in _cells(notebook) if isinstance(cell, dict)]
    return ["\n\n".join(cell.text for cell in texts if cell.text), *comments_not_read(texts)]


def _cells(notebook) -> list:
    """Returns the cells; before format 4, they were in worksheets."""
    if isinstance(notebook, dict):
        if isinstance(cells := notebook.get("cells"), list):
            return cells
        if isinstance(sheets := notebook.get("worksheets"), list):
            found = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
            return [cell for cells in found if isinstance(cells, list) for cell in cells]
    raise Unreadable("not a valid notebook (no cells)")


def _language(notebook) -> str:
    """Returns the language of the code, or ""."""
    for key in ("metadata", "language_info", "name"):
        notebook = notebook.get(key) if isinstance(notebook, dict) else None
    return notebook if isinstance(notebook, str) and notebook.isidentifier() else ""


def _text(cell: dict, language: str) -> Seen:
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(line for line in source if isinstance(line, str))
    if not isinstance(source, str) or not source.strip():
        return Seen("")
    if cell.get("cell_type") == "code":
        return Seen(f"```{language}\n{source.strip(chr(10))}\n```")
    if cell.get("cell_type") not in ("markdown", "heading"):
        return Seen("")
    seen = visible_text(unix_newlines(source))
    return seen._replace(text=seen.text.strip())
