"""An editor that shows grey words after the cursor, as the text could go on."""

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QTextCharFormat, QTextLayout
from PySide6.QtWidgets import QPlainTextEdit


class GhostEdit(QPlainTextEdit):
    """An editor. Tab takes the first grey word, the right arrow all of them, Escape none.

    Signals:
        moved: the text or the cursor changed, and the grey words no longer fit.
    """

    moved = Signal()

    def __init__(self):
        super().__init__()
        self.setTabChangesFocus(True)
        self._words: list[str] = []
        self._shown_in, self._is_taking = None, False
        self.cursorPositionChanged.connect(self._follow)
        self.textChanged.connect(self._follow)
        self._before = ""

    @property
    def before(self) -> str:
        """The text before the cursor."""
        return self.toPlainText()[: self.textCursor().position()]

    @property
    def ghost(self) -> str:
        """The grey words."""
        return "".join(self._words)

    def suggest(self, words: list[str]) -> None:
        """Shows grey words after the cursor; each has the spaces before it."""
        self._words = list(words)
        self._show()

    def keyPressEvent(self, event) -> None:
        """Takes words, or passes the key on."""
        key, is_alone = event.key(), not event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier
        if self._words and is_alone and key in (Qt.Key.Key_Tab, Qt.Key.Key_Right):
            number = 1 if key == Qt.Key.Key_Tab else len(self._words)
            self.textCursor().insertText("".join(self._words[:number]))
        elif self._words and key == Qt.Key.Key_Escape:
            self.suggest([])
        else:
            super().keyPressEvent(event)

    def focusNextPrevChild(self, next: bool) -> bool:
        """Leaves Tab to the grey words while there are any."""
        return False if next and self._words else super().focusNextPrevChild(next)

    def inputMethodEvent(self, event) -> None:
        """Hides the grey words while an input method composes in their place."""
        self.suggest([])
        super().inputMethodEvent(event)

    def _follow(self) -> None:
        """Keeps the grey words that go on from what was typed; else says that new ones are needed."""
        before, was = self.before, self._before
        if before == was and self._shown_in == self.textCursor().block():
            return
        self._before = before
        typed = before[len(was) :] if before.startswith(was) else None
        if typed and self.ghost.startswith(typed) and self.ghost != typed:
            self.suggest(_rest(self._words, len(typed)))
            return
        self.suggest([])
        self.moved.emit()

    def _show(self) -> None:
        """Lays the grey words out where an input method would show what it composes: they wrap, and are no text."""
        cursor, document = self.textCursor(), self.document()
        for block, ghost in ((self._shown_in, ""), (cursor.block(), self.ghost)):
            if block is None or not block.isValid():
                continue
            layout = block.layout()
            layout.setPreeditArea(cursor.positionInBlock() if ghost else -1, ghost)
            grey = QTextLayout.FormatRange()
            grey.start, grey.length, grey.format = cursor.positionInBlock(), len(ghost), QTextCharFormat()
            grey.format.setForeground(self.palette().placeholderText())
            layout.setFormats([grey] if ghost else [])
            document.markContentsDirty(block.position(), block.length())
        self._shown_in = cursor.block() if self._words else None


def _rest(words: list[str], length: int) -> list[str]:
    """Returns the words without so many characters at their beginning."""
    while length >= len(words[0]):
        length -= len(words[0])
        words = words[1:]
    return [words[0][length:], *words[1:]]
