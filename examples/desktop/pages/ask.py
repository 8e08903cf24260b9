"""Ask: questions about the notes, answered with the passages that the answers are from."""

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
        super().__init__("Ask", "Answers come from your notes, and say from which.")
        self._backend, self._request, self._turns = backend, None, []
        self._answers = QVBoxLayout()
        self._answers.setSpacing(14)
        self.question = QLineEdit(placeholderText="What would you like to know?")
        self.question.setAccessibleName("Question")
        self.question.returnPressed.connect(self.ask)
        self.send = button("Ask", self.ask, primary=True)
        line = row(self.question, self.send, end=False)
        self.column.addLayout(self._answers)
        self.column.addLayout(line)
        self.column.addStretch()
        backend.state_changed.connect(self._allow)
        self._allow()

    def ask(self) -> None:
        """Asks what is in the field; the same button stops it."""
        if self._request is not None:
            self._request.cancel()
            self._end()
            return
        question = self.question.text().strip()
        if not question or not self._backend.settings.folders:
            return
        self.trouble.say()
        self.question.clear()
        answer, card = quotation("Looking in your notes…", "muted"), Card()
        card.add(answer)
        self._answers.addWidget(Card(quotation(question), name="question"))
        self._answers.addWidget(card)
        self._written = ""

        def write(chunk: str) -> None:
            self._written += chunk
            _say(answer, self._written)

        def done(found: dict) -> None:
            self._turns = [*self._turns, question, found["text"]][-2 * _TURNS :]
            _say(answer, found["text"] if found["found"] else "Your notes do not say.")
            for source in found["sources"] if found["found"] else ():
                card.add(
                    row(self._source(source)), quotation(shorten(source["text"], _EXCERPT, placeholder=" …"), "small")
                )
            self._end()

        def failed(error) -> None:
            card.hide()
            self.trouble.say(sentence(error), "Ask again", lambda: self._again(question))
            self._end()

        self._request = self._backend.call(
            "ask",
            done,
            failed,
            on_text=write,
            question=question,
            before=self._turns,
            **{**self._backend.source, **self._backend.learnt},
        )
        self.send.setText("Stop")
        self._scroll()

    def _again(self, question: str) -> None:
        self.question.setText(question)
        self.ask()

    def _end(self) -> None:
        self._request = None
        self.send.setText("Ask")
        self._scroll()

    def _scroll(self) -> None:
        bar = self.verticalScrollBar()
        QTimer.singleShot(50, lambda: bar.setValue(bar.maximum()))

    def _allow(self) -> None:
        has_notes = bool(self._backend.settings.folders)
        self.question.setEnabled(has_notes)
        self.send.setEnabled(has_notes)
        self.lead.setText(
            "Answers come from your notes, and say from which."
            if has_notes
            else "Choose a folder under Notes first. Then ask anything that your notes may say."
        )

    def _source(self, source: dict):
        """Returns a button that opens a source."""
        place = " › ".join([source["document"], *source["headings"]])
        return button(place, lambda: self._open(source["document"]), link=True)

    def _open(self, document: str) -> None:
        for folder in map(Path, self._backend.settings.folders):
            for path in (folder / document, folder.parent / document):
                if path.is_file():
                    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))
                    return
        self.trouble.say("This note was moved or deleted since it was read.")


def _say(label, words: str) -> None:
    label.setProperty("kind", "")
    label.style().polish(label)
    label.setText(words)
