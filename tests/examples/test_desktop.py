"""The desktop example: a window, without a screen, that learns three short notes with the bundled model."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from served import SECONDS, WarmServers, all_gone, processes_below

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
pytest.importorskip("PySide6.QtWidgets", reason="needs PySide6: `pip install sebp-edge[desktop]`", exc_type=ImportError)

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QMessageBox, QPushButton

from desktop.app import Window
from desktop.backend import Settings
from desktop.ghost_text import GhostEdit

pytestmark = pytest.mark.slow
OF_EXAMPLE = Path(__file__).parents[2] / "examples" / "notes"
NOTES = ("about-these-notes.md", "house-rules.txt", "people-and-places.md")


@pytest.fixture(scope="session")
def app():
    return QApplication.instance() or QApplication([])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def known_machine(cache, monkeypatch):
    """What a plan asks of this machine is measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "my notes"
    folder.mkdir()
    for name in NOTES:
        (folder / name).write_bytes((OF_EXAMPLE / name).read_bytes()[:500])
    return folder


@pytest.fixture
def open_window(app, tmp_path):
    """A function that opens a window with the folders that were chosen before."""
    opened = []

    def make(*folders):
        settings = Settings(store=str(tmp_path / "store"), folders=[str(folder) for folder in folders])
        window = Window(settings, tmp_path / "draft.txt")
        opened.append(window)
        window.show()
        wait(lambda: window.backend.state == "ready")
        return window

    yield make
    for window in opened:
        if window.isVisible():
            window.close()


@pytest.fixture
def warm_servers(monkeypatch):
    """Those that windows start."""
    with WarmServers() as servers:
        monkeypatch.setattr("sebp_edge.serve.client.command_of", lambda *_: servers.command)
        yield servers


def wait(condition):
    """Lets the window work until something is so."""
    until = time.monotonic() + SECONDS
    while not (found := condition()):
        QTest.qWait(10)
        assert time.monotonic() < until
    return found


def words(widget):
    """What a page says, as far as it is shown."""
    return "\n".join(label.text() for label in widget.findChildren(QLabel) if label.isVisibleTo(widget))


def press(widget, name):
    """Presses the button with these words."""
    (button,) = [each for each in widget.findChildren(QPushButton) if each.text() == name and each.isVisibleTo(widget)]
    assert button.isEnabled()
    QTest.mouseClick(button, Qt.MouseButton.LeftButton)


def answer(window, name):
    """Presses a button of the question that is shown; by default, the keyboard would keep what is learnt."""
    question = wait(lambda: next((each for each in window.findChildren(QMessageBox) if each.isVisible()), None))
    assert question.defaultButton().text() in ("Keep it", "Go on learning")
    (button,) = (each for each in question.buttons() if each.text() == name)
    QTest.mouseClick(button, Qt.MouseButton.LeftButton)
    wait(lambda: not any(each.isVisible() for each in window.findChildren(QMessageBox)))


def begin_to_learn(window):
    window.show_page(window.learn)
    wait(lambda: window.learn._plan.start.isEnabled())
    assert "GB it may use" in words(window.learn)
    press(window.learn, "Learn")
    wait(lambda: window.backend.job is not None and window.backend.job["state"] == "running")


def server(window, started=()):
    """The process that the window has started, or the first of those that took its place."""
    return psutil.Process((*started, window.backend._client.process)[0].pid)


def test_the_address_and_the_token_are_copied_for_other_apps_and_work_until_the_window_is_closed(
    warm_servers, open_window, notes
):
    def listed(address, token):
        request = urllib.request.Request(f"{address}/models", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return [each["id"] for each in json.load(answer)["data"]]

    window, copied = open_window(), []
    for what in ("address", "token"):
        press(window, f"Copy {what}")
        copied.append(QApplication.clipboard().text())
    assert listed(*copied) == ["base"]
    window.notes.add_folder(str(notes))  # which starts another server
    wait(lambda: window.backend.state == "ready" and window.notes.found)
    assert listed(*copied) == ["base", "base:ask"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        listed(copied[0], "wrong")
    window.close()
    with pytest.raises(urllib.error.URLError):
        listed(*copied)


def test_a_folder_is_chosen_learnt_with_a_pause_and_asked(warm_servers, open_window, notes):
    window = open_window()
    window.notes.add_folder(str(notes))
    wait(lambda: window.notes.found)
    assert window.notes.found["documents"] == len(NOTES)
    begin_to_learn(window)
    press(window.learn, "Pause")
    wait(lambda: window.backend.job["state"] == "paused")
    assert "Paused at" in words(window.learn)
    before = window.backend.job["progress"]
    shares = []
    window.backend.job_changed.connect(lambda: shares.append(window.backend.job["progress"]))
    window.learn._progress.go_on.setFocus()
    press(window.learn, "Go on")
    assert not window.learn._progress.cancel.hasFocus()
    assert window.learn._progress.cancel.focusPolicy() == Qt.FocusPolicy.NoFocus
    wait(lambda: window.backend.job["state"] == "done")
    assert min(shares) >= before and shares == sorted(shares)
    assert "Version 1" in wait(lambda: window.backend.versions and words(window.versions))
    window.show_page(window.ask)
    QTest.keyClicks(window.ask.question, "What is mended at the kitchen table after nine?")
    QTest.keyClick(window.ask.question, Qt.Key.Key_Return)
    wait(lambda: window.ask._request is None)
    assert "Nothing is mended at the kitchen table" in words(window.ask)
    assert any("house-rules.txt" in each.text() for each in window.ask.findChildren(QPushButton))


def test_a_killed_worker_is_told_and_what_is_half_learnt_outlives_the_window(warm_servers, open_window, notes):
    window = open_window(notes)
    window.write.editor.setPlainText("Dear Ebba,")
    begin_to_learn(window)
    wait(lambda: window.backend.job["last_event"] > 10)
    own = server(window, warm_servers.started)
    (worker,) = (child for child in own.children() if os.getsid(child.pid) == child.pid)
    worker.kill()
    wait(lambda: window.backend.job["state"] == "interrupted")
    assert "has stopped" in words(window.learn)
    press(window.learn, "Go on")
    wait(lambda: window.backend.job["state"] == "running")
    processes = processes_below(own.pid)
    assert len(processes) >= 2
    window.close()
    assert all_gone(processes)
    window = open_window(notes)
    assert window.write.editor.toPlainText() == "Dear Ebba,"
    assert "Nothing is lost" in wait(lambda: window.backend.job and words(window.learn))
    press(window.learn, "Discard")
    answer(window, "Keep it")
    assert window.backend.job is not None
    press(window.learn, "Discard")
    answer(window, "Throw away")
    wait(lambda: window.backend.job is None)
    assert "Nothing is lost" not in words(window.learn)


def test_a_killed_server_is_told_and_another_one_starts(open_window, notes):
    window = open_window(notes)
    processes = processes_below(server(window).pid)
    server(window).kill()
    wait(lambda: window.backend.state == "lost")
    assert all_gone(processes)
    assert "has stopped" in words(window)
    press(window, "Go on")
    wait(lambda: window.backend.state == "ready")
    wait(lambda: window.notes.found)
    assert "has stopped" not in words(window)


def test_grey_words_are_no_text_until_they_are_taken(app):
    editor = GhostEdit()
    editor.show()
    moved = []
    editor.moved.connect(lambda: moved.append(editor.before))
    QTest.keyClicks(editor, "Soup first,")
    editor.suggest([" then", " decisions", "."])
    moved.clear()
    QTest.keyClicks(editor, " th")
    assert (editor.toPlainText(), editor.ghost, moved) == ("Soup first, th", "en decisions.", [])
    QTest.keyClick(editor, Qt.Key.Key_Tab)
    assert (editor.toPlainText(), editor.ghost, moved) == ("Soup first, then", " decisions.", [])
    QTest.keyClicks(editor, " x")
    assert (editor.toPlainText(), editor.ghost, moved[-1]) == ("Soup first, then x", "", "Soup first, then x")
    editor.suggest(["y", " z"])
    for modifiers in (Qt.KeyboardModifier.NoModifier, Qt.KeyboardModifier.ControlModifier):
        QTest.keyClick(editor, Qt.Key.Key_End, modifiers)  # are the editor's own
    assert (editor.toPlainText(), editor.ghost) == ("Soup first, then x", "y z")
    QTest.keyClick(editor, Qt.Key.Key_Right)
    assert editor.toPlainText() == "Soup first, then xy z"
    editor.suggest([" more"])
    QTest.keyClick(editor, Qt.Key.Key_Escape)
    assert (editor.toPlainText(), editor.ghost) == ("Soup first, then xy z", "")


def test_what_is_chosen_is_kept_at_once(app, tmp_path, monkeypatch):
    """The window may be killed: what it has chosen is in its file before it ends."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "notes").mkdir()
    code = f"""
import os, signal, sys
from PySide6.QtCore import QTimer
from desktop import app
from desktop.pages.notes import Notes
begun = Notes.__init__
def begin(page, *arguments):
    begun(page, *arguments)
    def choose():
        page.add_folder({str(tmp_path / "notes")!r})
        os.kill(os.getpid(), signal.SIGKILL)
    QTimer.singleShot(0, choose)
Notes.__init__ = begin
app.main()
"""
    examples = Path(__file__).parents[2] / "examples"
    done = subprocess.run([sys.executable, "-c", code], cwd=examples, timeout=SECONDS)
    assert done.returncode == -signal.SIGKILL
    (kept,) = (tmp_path / "data").rglob("settings.ini")
    assert str(tmp_path / "notes") in kept.read_text()
