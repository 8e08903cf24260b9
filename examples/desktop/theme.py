"""How the window looks, in the system's light or dark colours."""

from string import Template

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

_LIGHT = {
    "page": "#fbfaf7",
    "side": "#f3f1ec",
    "card": "#ffffff",
    "line": "#e4e1d9",
    "text": "#20211d",
    "muted": "#686a62",
    "accent": "#1f6f5c",
    "on_accent": "#ffffff",
    "tint": "#e3efe9",
    "warn": "#8a4b14",
    "warn_tint": "#faeedd",
}
_DARK = {
    "page": "#1b1c1a",
    "side": "#151614",
    "card": "#242522",
    "line": "#383a35",
    "text": "#ecebe5",
    "muted": "#a3a49b",
    "accent": "#6fc3a8",
    "on_accent": "#10231c",
    "tint": "#24362f",
    "warn": "#f0b97d",
    "warn_tint": "#3a2c1c",
}
_STYLE = Template("""
* { color: $text; font-size: 14px; }
QMainWindow, QScrollArea, QWidget#page, QStackedWidget { background: $page; border: none; }
QWidget#side { background: $side; border-right: 1px solid $line; }
QLabel { background: transparent; }
QLabel[kind="name"] { font-size: 15px; font-weight: 700; }
QLabel[kind="title"] { font-size: 24px; font-weight: 650; }
QLabel[kind="figure"] { font-size: 20px; font-weight: 650; }
QLabel[kind="head"] { font-weight: 650; }
QLabel[kind="muted"] { color: $muted; }
QLabel[kind="small"] { color: $muted; font-size: 12px; }
QLabel[kind="accent"] { color: $accent; font-weight: 650; font-size: 12px; }
QFrame#card { background: $card; border: 1px solid $line; border-radius: 10px; }
QFrame#question { background: $tint; border: none; border-radius: 10px; }
QFrame#trouble { background: $warn_tint; border: none; border-radius: 8px; }
QFrame#trouble QLabel { color: $warn; }
QPushButton { background: $card; border: 1px solid $line; border-radius: 7px; padding: 7px 14px; }
QPushButton:hover { border-color: $accent; }
QPushButton:focus { border: 2px solid $accent; padding: 6px 13px; }
QPushButton:disabled { color: $muted; background: transparent; }
QPushButton[primary="true"] { background: $accent; border-color: $accent; color: $on_accent; font-weight: 650; }
QPushButton[primary="true"]:focus { border: 2px solid $text; }
QPushButton[primary="true"]:disabled { background: $line; border-color: $line; color: $muted; }
QPushButton[link="true"] { background: transparent; border: none; color: $accent; padding: 2px 0; text-align: left; }
QPushButton[link="true"]:hover, QPushButton[link="true"]:focus { text-decoration: underline; }
QPushButton[entry="true"] { background: transparent; border: none; text-align: left; padding: 9px 12px; }
QPushButton[entry="true"]:hover { background: $line; }
QPushButton[entry="true"]:focus { border: 2px solid $line; padding: 7px 10px; }
QPushButton[entry="true"]:checked { background: $tint; color: $accent; font-weight: 650; }
QLineEdit, QComboBox, QPlainTextEdit {
    background: $card; border: 1px solid $line; border-radius: 7px; padding: 7px 10px;
    selection-background-color: $accent; selection-color: $on_accent;
}
QPlainTextEdit { border-radius: 10px; padding: 12px; font-size: 16px; }
QLineEdit:focus, QComboBox:focus, QPlainTextEdit:focus { border-color: $accent; }
QComboBox::drop-down { border: none; width: 22px; }
QComboBox QAbstractItemView { background: $card; border: 1px solid $line; selection-background-color: $tint;
    selection-color: $text; }
QProgressBar { background: $line; border: none; border-radius: 4px; max-height: 8px; min-height: 8px; }
QProgressBar::chunk { background: $accent; border-radius: 4px; }
QProgressBar#thin { max-height: 4px; min-height: 4px; border-radius: 2px; }
QProgressBar#thin::chunk { border-radius: 2px; }
QScrollBar:vertical { background: transparent; width: 10px; }
QScrollBar::handle:vertical { background: $line; border-radius: 4px; min-height: 30px; margin: 1px; }
QScrollBar::add-line, QScrollBar::sub-line, QScrollBar::add-page, QScrollBar::sub-page { height: 0; background: none; }
QToolTip { background: $card; color: $text; border: 1px solid $line; }
""")


def use_theme(app: QApplication) -> None:
    """Dresses the app, now and whenever the system changes between light and dark."""
    app.setStyle("Fusion")
    hints, dark = app.styleHints(), Qt.ColorScheme.Dark
    hints.colorSchemeChanged.connect(lambda scheme: dress(app, is_dark=scheme == dark))
    # Some desktops say it by their palette only.
    dress(app, is_dark=hints.colorScheme() == dark or app.palette().window().color().lightness() < 128)


def dress(app: QApplication, *, is_dark: bool) -> None:
    """Gives the app dark or light colours."""
    colours = _DARK if is_dark else _LIGHT
    palette = QPalette(QColor(colours["card"]), QColor(colours["page"]))
    roles = {"Accent": "accent", "Highlight": "accent", "HighlightedText": "on_accent", "PlaceholderText": "muted"}
    for role, colour in roles.items():
        palette.setColor(QPalette.ColorRole[role], QColor(colours[colour]))
    app.setPalette(palette)
    app.setStyleSheet(_STYLE.substitute(colours))
