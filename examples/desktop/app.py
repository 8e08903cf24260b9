"""The window: a sidebar, the pages, and what it says when the server has gone."""

import signal
import sys
from pathlib import Path

from PySide6.QtCore import QSettings, QStandardPaths, Qt
from PySide6.QtWidgets import (
    QApplication,
    QButtonGroup,
    QHBoxLayout,
    QMainWindow,
    QProgressBar,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from desktop.backend import Backend, Settings
from desktop.pages.ask import Ask
from desktop.pages.learn import Learn
from desktop.pages.notes import Notes
from desktop.pages.versions import Versions
from desktop.pages.write import Write
from desktop.theme import use_theme
from desktop.widgets import Trouble, button, text
from desktop.words import percent, sentence


class Window(QMainWindow):
    """The window.

    Args:
        settings: what the owner chose before.
        draft: the file that keeps what is written.
    """

    def __init__(self, settings: Settings, draft: Path):
        super().__init__()
        self.setWindowTitle("Own Words")
        self.resize(940, 680)
        self.setMinimumSize(560, 420)
        self.backend = Backend(settings)
        self.notes = Notes(self.backend, lambda: self.show_page(self.learn))
        self.learn, self.ask = Learn(self.backend), Ask(self.backend)
        self.write, self.versions = Write(self.backend, draft), Versions(self.backend)
        self._pages = QStackedWidget()
        self._entries, self._copies = QButtonGroup(self), []
        self._trouble, self._status = Trouble(), text("", "small")
        self._status.setContentsMargins(12, 0, 0, 0)
        self._bar = QProgressBar(objectName="thin", textVisible=False, maximum=1000)
        whole = QWidget(objectName="page")
        halves = QHBoxLayout(whole)
        halves.setContentsMargins(0, 0, 0, 0)
        halves.setSpacing(0)
        halves.addWidget(self._side())
        right = QVBoxLayout()
        right.setSpacing(0)
        around = QVBoxLayout()
        around.setContentsMargins(28, 14, 28, 0)
        around.addWidget(self._trouble)
        right.addLayout(around)
        right.addWidget(self._pages, 1)
        halves.addLayout(right, 1)
        self.setCentralWidget(whole)
        self.backend.state_changed.connect(self._show_state)
        self.backend.job_changed.connect(self._show_job)
        self._show_job()
        self.show_page(self.notes)

    def show_page(self, page: QWidget) -> None:
        """Shows a page."""
        self._pages.setCurrentWidget(page)
        self._entries.button(self._pages.indexOf(page)).setChecked(True)
        {self.ask: self.ask.question, self.write: self.write.editor}.get(page, page).setFocus()

    def closeEvent(self, event) -> None:
        """Saves the text, and ends all processes. What is half learnt is kept."""
        self.hide()
        self.write.save()
        self.backend.close()
        event.accept()

    def _side(self) -> QWidget:
        side = QWidget(objectName="side")
        side.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        side.setFixedWidth(176)
        column = QVBoxLayout(side)
        column.setContentsMargins(12, 26, 12, 18)
        column.setSpacing(3)
        name = text("Own Words", "name")
        name.setContentsMargins(12, 0, 0, 14)
        column.addWidget(name)
        pages = {
            "Notes": self.notes,
            "Learn": self.learn,
            "Ask": self.ask,
            "Write": self.write,
            "Versions": self.versions,
        }
        for number, (words, page) in enumerate(pages.items()):
            entry = button(words, lambda page=page: self.show_page(page), entry=True)
            entry.setCheckable(True)
            entry.setShortcut(f"Ctrl+{number + 1}")
            entry.setToolTip(f"Ctrl+{number + 1}")
            self._entries.addButton(entry, number)
            self._pages.addWidget(page)
            column.addWidget(entry)
        column.addStretch()
        for number, what in enumerate(("address", "token")):
            copy = button(f"Copy {what}", lambda number=number: self._copy(number), link=True)
            copy.setToolTip("For other apps on this computer")
            self._copies.append(copy)
            column.addWidget(copy)
        column.addWidget(self._status)
        column.addWidget(self._bar)
        return side

    def _copy(self, number: int) -> None:
        QApplication.clipboard().setText(self.backend.endpoint[number])

    def _show_state(self) -> None:
        for copy in self._copies:
            copy.setEnabled(self.backend.state == "ready")
        trouble = self.backend.trouble
        if trouble is None:
            self._trouble.say()
        else:
            self._trouble.say(sentence(trouble), "Go on", self.backend.restart)

    def _show_job(self) -> None:
        job, is_learning = self.backend.job, self.backend.is_learning
        self._bar.setVisible(is_learning)
        self._bar.setValue(round(1000 * job["progress"]) if is_learning else 0)
        self._status.setText(f"Learning {percent(job['progress'])}" if is_learning else "Stays on this computer")


def main() -> int:
    """Shows the window until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and the server with it
    app = QApplication(sys.argv)
    app.setApplicationName("own-words")
    use_theme(app)
    data = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.AppDataLocation))
    kept = QSettings(str(data / "settings.ini"), QSettings.Format.IniFormat)

    def save(settings: Settings) -> None:
        for name in ("folders", "model", "budget"):
            kept.setValue(name, getattr(settings, name))
        kept.sync()

    window = Window(
        Settings(
            store=str(data / "adapters"),
            save=save,
            folders=kept.value("folders", [], list),
            model=kept.value("model", "tiny", str),
            budget=kept.value("budget") or None,
        ),
        data / "draft.txt",
    )
    window.show()
    return app.exec()
