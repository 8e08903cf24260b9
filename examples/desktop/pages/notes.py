"""Notes: the folders, what would be read of them, and what is left out."""

from collections.abc import Callable
from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QSizePolicy, QVBoxLayout

from desktop.backend import NAME, Backend
from desktop.widgets import Card, Page, button, clear, quotation, row, text
from desktop.words import sentence

_SHOWN = 4  # files of each reason
_PAGE = 1800  # characters, as publishers count them


class Notes(Page):
    """Shows and changes the folders.

    Args:
        show_learn: called to go on to the next page.
    """

    def __init__(self, backend: Backend, show_learn: Callable[[], None]):
        super().__init__("Notes", "Your notes are read on this computer. They never leave it.")
        self._backend, self._show_learn, self._request = backend, show_learn, None
        self.found: dict | None = None
        self._folders, self._result = QVBoxLayout(), QVBoxLayout()
        self._folders.setSpacing(8)
        self._result.setSpacing(14)
        self.column.addLayout(self._folders)
        self.choose = button("Choose a folder…", self._choose, primary=True)
        self.column.addLayout(row(self.choose))
        self.column.addLayout(self._result)
        self.column.addStretch()
        self._show_folders()
        backend.state_changed.connect(self.inspect)
        backend.job_changed.connect(self._allow)

    def add_folder(self, folder: str) -> None:
        """Adds a folder, and reads what is in it."""
        if folder not in self._backend.settings.folders:
            self._change([*self._backend.settings.folders, folder])

    def inspect(self) -> None:
        """Looks what would be read."""
        self._allow()
        if self._backend.state != "ready" or not self._backend.settings.folders:
            return
        self.trouble.say()
        clear(self._result)
        self._result.addWidget(text("Looking at your notes…", "muted"))
        self._request = self._backend.call("inspect", self._show, self._fail, **self._backend.source, name=NAME)

    def _choose(self) -> None:
        folder = QFileDialog.getExistingDirectory(self, "Choose a folder with notes", str(Path.home()))
        if folder:
            self.add_folder(folder)

    def _change(self, folders: list[str]) -> None:
        if self._request is not None:
            self._request.cancel()
        self._backend.change(folders=folders)
        self.trouble.say()
        clear(self._result)
        self._show_folders()
        self._backend.restart()  # a server reads only the folders that it was started with

    def _allow(self) -> None:
        self.choose.setDisabled(self._backend.is_learning)
        self.choose.setToolTip("Pause the learning first." if self._backend.is_learning else "")

    def _show_folders(self) -> None:
        clear(self._folders)
        folders = self._backend.settings.folders
        self.choose.setText("Add a folder…" if folders else "Choose a folder…")
        self.choose.setProperty("primary", not folders)
        self.choose.style().polish(self.choose)
        for folder in folders:
            name, place = text(Path(folder).name, "head"), text(str(Path(folder).parent), "small")
            names = QVBoxLayout()
            names.setSpacing(1)
            names.addWidget(name)
            names.addWidget(place)
            remove = button("Remove", lambda gone=folder: self._remove(gone), link=True)
            remove.setAccessibleName(f"Remove {Path(folder).name}")
            remove.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
            line = row(remove, end=False)
            line.insertLayout(0, names, 1)
            self._folders.addWidget(Card(line))
        if not folders:
            self._folders.addWidget(
                Card(
                    text("Start here", "head"),
                    text(
                        "Choose the folder that you keep your notes in: Markdown, plain text, Word, PDF, mails or "
                        "exported chats. You will see what would be read before anything is learnt.",
                        "muted",
                    ),
                )
            )

    def _remove(self, folder: str) -> None:
        if self._backend.is_learning:
            self.trouble.say("The notes are being learnt. Pause the learning first.")
            return
        self._change([one for one in self._backend.settings.folders if one != folder])

    def _fail(self, error) -> None:
        clear(self._result)
        self.trouble.say(sentence(error), "Try again", self.inspect)

    def _show(self, found: dict) -> None:
        self.found = found
        clear(self._result)
        if found["refusal"]:
            self.trouble.say(found["refusal"])
        pages = max(1, round(found["characters"] / _PAGE))
        figures = row(
            _figure(f"{found['documents']:,}", "note" if found["documents"] == 1 else "notes"),
            _figure(f"{pages:,}", f"page{'' if pages == 1 else 's'} of text"),
            _figure(f"{sum(len(one['sources']) for one in found['left_out']):,}", "left out"),
            end=False,
        )
        self._result.addLayout(figures)
        if found["left_out"]:
            self._result.addWidget(_left_out(found["left_out"]))
        if not found["refusal"]:
            self._result.addLayout(row(button("Go on to learn", self._show_learn, primary=True)))


def _figure(number: str, what: str) -> Card:
    card = Card(text(number, "figure"), text(what, "muted"))
    card.column.setSpacing(0)
    card.column.addStretch()  # numbers stand side by side, also where words below one wrap
    return card


def _left_out(groups: list[dict]) -> Card:
    card = Card(text("Left out", "head"))
    card.column.setSpacing(2)
    for group in groups:
        names = ", ".join(group["sources"][:_SHOWN])
        more = len(group["sources"]) - _SHOWN
        card.column.addSpacing(6)
        card.add(quotation(names + (f" and {more:,} more" if more > 0 else "")), text(group["reason"], "small"))
    return card
