"""What the pages are made of."""

from collections.abc import Callable

from PySide6.QtCore import QPointF, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import (
    QComboBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

_WIDTH = 720


def text(words: str = "", kind: str = "") -> QLabel:
    """Returns words that wrap; `kind` is "title", "head", "figure", "muted", "small" or "accent"."""
    label = QLabel(words)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    label.setMinimumWidth(60)  # whatever its longest word takes
    label.setProperty("kind", kind)
    return label


def quotation(words: str, kind: str = "") -> QLabel:
    """Returns the owner's own or generated words, which can be selected."""
    label = text(words, kind)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def button(words: str, clicked: Callable[[], None], **looks: bool) -> QPushButton:
    """Returns a button; `looks` is primary=True or link=True."""
    made = QPushButton(words)
    made.setAutoDefault(True)  # Enter presses it
    made.setCursor(Qt.CursorShape.PointingHandCursor)
    made.clicked.connect(lambda: clicked())
    for look, value in looks.items():
        made.setProperty(look, value)
    return made


class Choice(QComboBox):
    """A list to choose from, which shrinks with the window.

    Args:
        name: what is chosen, for screen readers.
    """

    def __init__(self, name: str):
        super().__init__(accessibleName=name, minimumContentsLength=6)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)

    def paintEvent(self, event) -> None:
        """Draws the arrow, which a style sheet cannot colour."""
        super().paintEvent(event)
        painter, x, y = QPainter(self), self.width() - 18, self.height() / 2
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(self.palette().placeholderText(), 1.6))
        painter.drawPolyline([QPointF(x - 4, y - 2), QPointF(x, y + 2), QPointF(x + 4, y - 2)])


def row(*widgets: QWidget, end: bool = True) -> QHBoxLayout:
    """Returns widgets side by side, from the left."""
    layout = QHBoxLayout()
    layout.setSpacing(10)
    for widget in widgets:
        layout.addWidget(widget)
    if end:
        layout.addStretch()
    return layout


class Card(QFrame):
    """A box that holds widgets and layouts below each other."""

    def __init__(self, *parts: QWidget | QLayout, name: str = "card"):
        super().__init__(objectName=name)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(18, 16, 18, 16)
        self.column.setSpacing(8)
        self.add(*parts)

    def add(self, *parts: QWidget | QLayout) -> None:
        """Adds parts at the end."""
        for part in parts:
            (self.column.addWidget if isinstance(part, QWidget) else self.column.addLayout)(part)


class Trouble(Card):
    """What went wrong in one sentence, and a button that mends it; hidden if nothing did."""

    def __init__(self):
        super().__init__(name="trouble")
        self.column.setContentsMargins(14, 10, 14, 10)
        self.words, self._mend = text(), None
        self.button = button("", lambda: self._mend())
        line = QHBoxLayout()
        line.addWidget(self.words, 1)
        line.addWidget(self.button)
        self.column.addLayout(line)
        self.hide()

    def say(self, words: str = "", offer: str = "", mend: Callable[[], None] | None = None) -> None:
        """Shows a sentence and perhaps a button; hides both without words."""
        self.words.setText(words)
        self._mend = mend
        self.button.setText(offer)
        self.button.setVisible(bool(offer))
        self.setVisible(bool(words))


class Page(QScrollArea):
    """A page: a title, a sentence below it, and parts in a column of a width that is easy to read.

    Attributes:
        trouble: what went wrong on this page.
    """

    def __init__(self, title: str, lead: str):
        super().__init__()
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        body = QWidget(objectName="page")
        around = QHBoxLayout(body)
        around.setContentsMargins(28, 26, 28, 24)
        inner = QWidget(maximumWidth=_WIDTH)
        around.addStretch(1)
        around.addWidget(inner, 1000)
        around.addStretch(1)
        self.column = QVBoxLayout(inner)
        self.column.setContentsMargins(0, 0, 0, 0)
        self.column.setSpacing(14)
        self.trouble = Trouble()
        self.lead = text(lead, "muted")
        self.column.addWidget(text(title, "title"))
        self.column.addWidget(self.lead)
        self.column.addWidget(self.trouble)
        self.setWidget(body)

    def add(self, *parts: QWidget) -> None:
        """Adds parts at the end."""
        for part in parts:
            self.column.addWidget(part)


def clear(layout: QLayout) -> None:
    """Removes all that is in a layout."""
    while (item := layout.takeAt(0)) is not None:
        if item.widget() is not None:
            item.widget().deleteLater()
        elif item.layout() is not None:
            clear(item.layout())
