"""Ask: questions about the notes, answered with the passages that the answers are from."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from textwrap import shorten

from PySide6.QtCore import Qt, QTimer, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QLineEdit, QVBoxLayout

from desktop.backend import Backend
from desktop.widgets import Card, Page, button, quotation, row
from desktop.words import sentence

_AROUND = 200  # characters of a passage before and after the sentence
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

        params = {**self._backend.source, "question": question, "before": self._turns}
        self._request = self._backend.call("ask", done, failed, **params)
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
    """An answer with the passages that it is from, whose notes `open` opens."""

    def __init__(self, open: Callable[[str], None]):
        self._words, self._open = quotation("Looking in your notes…", "muted"), open
        super().__init__(self._words)

    def say(self, words: str) -> None:
        """Says something instead."""
        self._words.setProperty("kind", "")
        self._words.style().polish(self._words)
        self._words.setText(words)

    def end(self, found: dict) -> None:
        """Shows the answer, and its sentence in the passage around it."""
        self.say(found["text"] if found["found"] else "Your notes do not say.")
        for source in found["sources"][:1]:
            place = " › ".join([source["document"], *source["headings"], f"line {found['line']}"])
            link = button(place, lambda document=source["document"]: self._open(document), link=True)
            link.setMinimumWidth(60)
            passage = quotation(_in_passage(found["sentence"], source["text"]), "small")
            passage.setTextFormat(Qt.TextFormat.RichText)
            self.add(row(link), passage)


def _in_passage(sentence: str, passage: str) -> str:
    """Returns a sentence in bold, with the words of the passage around it, as HTML."""
    before, _, after = passage.partition(sentence)
    before = shorten(before[::-1], _AROUND, placeholder=" …")[::-1]
    after = shorten(after, _AROUND, placeholder=" …")
    return " ".join(filter(None, (escape(before), f"<b>{escape(' '.join(sentence.split()))}</b>", escape(after))))
