"""Write: an editor in which the model suggests the next words."""

from pathlib import Path

from PySide6.QtCore import QTimer

from desktop.backend import Backend
from desktop.ghost_text import GhostEdit
from desktop.widgets import Page, text
from desktop.words import sentence

_WAIT_MS = 120  # after the last key
_SAVE_MS = 2000
_SURE = 0.3  # the least probability of suggested words
_CHARACTERS = 4000  # before the cursor, which the model sees


class Write(Page):
    """An editor with ghost text. Its text is kept in a file between two starts."""

    def __init__(self, backend: Backend, draft: Path):
        super().__init__("Write", "Grey words are suggestions: Tab takes one, → takes all, Escape none.")
        self._backend, self._draft, self._request = backend, draft, None
        self.editor = GhostEdit()
        self.editor.setAccessibleName("Text")
        self.editor.setPlaceholderText("Begin to write, and pause for a moment.")
        self.editor.setMinimumHeight(180)
        self.hint = text("", "small")
        self.column.addWidget(self.editor, 1)
        self.column.addWidget(self.hint)
        if draft.is_file():
            self.editor.setPlainText(draft.read_text(encoding="utf-8"))
        self._asking = QTimer(self, singleShot=True, interval=_WAIT_MS)
        self._saving = QTimer(self, singleShot=True, interval=_SAVE_MS)
        self._asking.timeout.connect(self._ask)
        self._saving.timeout.connect(self.save)
        self.editor.moved.connect(self._moved)
        self.editor.textChanged.connect(self._saving.start)
        backend.versions_changed.connect(self._say_whose)

    def save(self) -> None:
        """Keeps the text for the next start."""
        self._draft.parent.mkdir(parents=True, exist_ok=True)
        self._draft.write_text(self.editor.toPlainText(), encoding="utf-8")

    def _moved(self) -> None:
        if self._request is not None:
            self._request.cancel()
        self._asking.start()

    def _ask(self) -> None:
        before = self.editor.before[-_CHARACTERS:]
        if before.strip() and self.editor.hasFocus() and self._backend.state == "ready":
            params = {"before": before, "min_probability": _SURE, **self._backend.learnt}
            self._request = self._backend.call("complete", self._suggest, self._fail, **params)

    def _suggest(self, found: dict) -> None:
        self.editor.suggest(found["words"])
        self._say_whose()

    def _fail(self, error) -> None:
        self.hint.setText(sentence(error))

    def _say_whose(self) -> None:
        active = self._backend.active
        self.hint.setText(
            "Suggestions are general until your notes are learnt: see Learn."
            if active is None
            else f"Suggestions are from version {active['version']}, which has learnt your notes."
        )
