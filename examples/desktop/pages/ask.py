"""Ask: questions about the notes, answered with the passages that the answers are from."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QLineEdit, QVBoxLayout

from desktop.backend import Backend
from desktop.widgets import Card, Page, button, quotation, row
from desktop.words import sentence

_EXCERPT = 160  # characters of a source
_TURNS = 3  # earlier questions that the next one may refer to


class Ask(Page):
    """A conversation about the notes."""

    def __init__(self, backend: Backend):
        super().__init__("Ask", "")
        self._backend, self._request, self._turns = backend, None, []
        self._answers = QVBoxLayout()
        self._answers.setSpacing(14)
        self.question = QLineEdit(placeholderText="What would you like to know?", accessibleName="Question")
        self.question.returnPressed.connect(self.ask)
        self.send = button("Ask", self.ask, primary=True)
        self.stop = button("Stop", self._stop)
        self.column.addLayout(self._answers)
        self.column.addLayout(row(self.question, self.send, self.stop, end=False))
        self.column.addStretch()
        backend.state_changed.connect(self._allow)
        self._allow()

    def ask(self) -> None:
        """Asks what is in the field."""
        question = self.question.text().strip()
        if not question or self._request is not None:
            return
        self.trouble.say()
        self.question.clear()
        answer = _Answer(self._open)
        self._answers.addWidget(Card(quotation(question), name="question"))
        self._answers.addWidget(answer)
        self._answer = answer

        def done(found: dict) -> None:
            self._turns = [*self._turns, question, found["text"]][-2 * _TURNS :]
            answer.end(found)
            self._end()

        def failed(error) -> None:
            answer.say("No answer.")
            self.trouble.say(sentence(error), "Ask again", lambda: self._again(question))
            self._end()

        params = {**self._backend.source, **self._backend.learnt, "question": question, "before": self._turns}
        self._request = self._backend.call("ask", done, failed, answer.write, **params)
        self._end(is_over=False)

    def _again(self, question: str) -> None:
        self.question.setText(question)
        self.ask()

    def _stop(self) -> None:
        self._request.cancel()
        self._answer.say("Stopped.")
        self._end()

    def _end(self, *, is_over: bool = True) -> None:
        self._request = None if is_over else self._request
        self._allow()
        bar = self.verticalScrollBar()
        QTimer.singleShot(50, lambda: bar.setValue(bar.maximum()))

    def _allow(self) -> None:
        has_notes = bool(self._backend.settings.folders)
        self.question.setEnabled(has_notes)
        self.send.setEnabled(has_notes)
        self.send.setVisible(self._request is None)
        self.stop.setVisible(self._request is not None)
        self.lead.setText(
            "Answers come from your notes, and say from which."
            if has_notes
            else "Choose a folder under Notes first. Then ask anything that your notes may say."
        )

    def _open(self, document: str) -> None:
        for folder in map(Path, self._backend.settings.folders):
            for path in (folder / document, folder.parent / document):
                if path.is_file():
                    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))
                    return
        self.trouble.say("This note was moved or deleted since it was read.")


class _Answer(Card):
    """An answer, as it is written, and then with its sources, which `open` opens."""

    def __init__(self, open: Callable[[str], None]):
        self._words, self._open = quotation("Looking in your notes…", "muted"), open
        self._written = ""
        super().__init__(self._words)

    def write(self, chunk: str) -> None:
        """Adds words."""
        self._written += chunk
        self.say(self._written)

    def say(self, words: str) -> None:
        """Says something instead."""
        self._words.setProperty("kind", "")
        self._words.style().polish(self._words)
        self._words.setText(words)

    def end(self, found: dict) -> None:
        """Shows the answer as it was checked, and its sources."""
        self.say(found["text"] if found["found"] else "Your notes do not say.")
        for source in found["sources"] if found["found"] else ():
            place = " › ".join([source["document"], *source["headings"]])
            link = button(place, lambda document=source["document"]: self._open(document), link=True)
            link.setMinimumWidth(60)
            self.add(row(link), quotation(_excerpt(source["text"], found["text"]), "small"))


def _excerpt(passage: str, answer: str) -> str:
    """Returns the sentence of a passage that has most of an answer's words; of several alike, the first."""
    wanted = set(re.findall(r"\w+", answer.lower()))
    sentences = [" ".join(part.strip("#>*- \t").split()) for part in re.split(r"(?<=[.!?])\s+|\n+", passage)]
    best = max(
        filter(None, sentences), key=lambda part: len(wanted & set(re.findall(r"\w+", part.lower()))), default=""
    )
    return shorten(best, _EXCERPT, placeholder=" …")
