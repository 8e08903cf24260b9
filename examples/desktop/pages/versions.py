"""Versions: what was learnt when, and the way back."""

from datetime import datetime

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QVBoxLayout

from desktop.backend import NAME, Backend
from desktop.widgets import Card, Page, button, clear, row, text
from desktop.words import count, sentence


class Versions(Page):
    """All versions, the newest first."""

    def __init__(self, backend: Backend):
        super().__init__("Versions", "Each time you learn makes a version. Any of them can be used again.")
        self._backend = backend
        self._list = QVBoxLayout()
        self._list.setSpacing(10)
        self.column.addLayout(self._list)
        self.column.addStretch()
        backend.versions_changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        clear(self._list)
        versions = self._backend.versions
        for record in reversed(versions):
            self._list.addWidget(self._card(record))
        if len(versions) > 1 and self._backend.active is not None:
            self._list.addLayout(row(button("Go back to the one before", self._go_back)))
        if not versions:
            self._list.addWidget(
                Card(text("Nothing is learnt yet", "head"), text("Choose your notes, then press Learn.", "muted"))
            )

    def _card(self, record: dict) -> Card:
        version = record["version"]
        made = datetime.fromisoformat(record["created"]).astimezone()
        name = text(f"Version {version}", "head")
        name.setWordWrap(False)
        if record["active"]:
            state = text("IN USE", "accent")
            state.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        else:
            state = button("Use this one", lambda: self._use(version), link=True)
            state.setAccessibleName(f"Use version {version}")
        facts = [f"{made:%-d %B %Y, %H:%M}", count(record["documents"], "note"), record["base_model"].split("/")[-1]]
        line = row(name, end=True)
        line.addWidget(state)
        return Card(line, text(" · ".join(facts), "muted"), text(_verdict(record), "small"))

    def _use(self, version: int) -> None:
        self._change("adapters.activate", version=version)

    def _go_back(self) -> None:
        self._change("adapters.rollback")

    def _change(self, method: str, **params) -> None:
        self.trouble.say()
        self._backend.call(
            method,
            lambda found: self._backend.look_at_versions(),
            lambda error: self.trouble.say(sentence(error)),
            name=NAME,
            **params,
        )


def _verdict(record: dict) -> str:
    before, after = record["heldout_loss_before"], record["heldout_loss_after"]
    if not before or after is None:
        return "Not tested: there were too few notes."
    change = 1 - after / before
    return (
        f"Unseen notes surprised it {abs(change):.0%} {'less' if change > 0 else 'more'} than the model without notes."
    )
