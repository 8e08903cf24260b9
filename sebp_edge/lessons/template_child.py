"""Renders with a model's chat template: the bundled one here, those of strangers in a child process within limits.

The child starts with the first conversation, renders many, and ends when it is idle, or with this process.
"""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.spawn import get_executable
from os import fsdecode
from pathlib import Path
from typing import NamedTuple

import jinja2
import markupsafe
import psutil

from sebp_edge.basics.children import PIPES, children
from sebp_edge.errors import ModelError
from sebp_edge.lessons import templates
from sebp_edge.values.documents import Message
from sebp_edge.values.model_reference import BUNDLED_FOLDER

# A rendering takes at most so many seconds, and one more for so many bytes of messages.
SECONDS, BYTES_PER_SECOND = 2, 5_000_000
START_SECONDS = 60
_SECONDS_BETWEEN_LOOKS = 0.05
# After a template has exceeded the limits so often, it renders nothing any more.
MAX_EXCEEDED = 3
_START = (
    "import json, runpy, sys; sys.path += json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)

Cut = tuple[int, bool]


class Rendering(NamedTuple):
    """A rendered conversation, and the spans that the template marks as the assistant's; None if they are not in it."""

    text: str
    spans: list[tuple[int, int]] | None


class TemplateRefuses(Exception):
    """A chat template did not render a conversation; the text is a verb, of which the conversation is the object."""


class Renderer:
    """Renders conversations with one chat template, each within some seconds. May be used in several threads."""

    def __init__(self, source: str, seconds: float = SECONDS):
        self.source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._num_exceeded = 0
        self._process: _Process | None = None
        bundled = (BUNDLED_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
        self._bundled = templates.Template(source) if source == bundled else None

    def __reduce__(self):
        return Renderer, (self.source, self._seconds)

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict], variables: dict, cuts: list[Cut]
    ) -> list[Rendering]:
        """Renders the beginnings of a conversation.

        Args:
            tools, variables: see `templates.Template.render`.
            cuts: for each beginning, its number of messages, and whether to add what begins the assistant's answer.

        Raises:
            TemplateRefuses: the template raised an error or exceeded a limit.
            ModelError: no child process can be started.
        """
        request = {"messages": list(messages), "tools": list(tools), "variables": variables, "cuts": cuts}
        with self._lock:
            answer = templates.answer(self._bundled, request) if self._bundled else self._answer(request)
        if answer is None:
            raise TemplateRefuses("refuses")
        return [Rendering(text, spans and [(begin, end) for begin, end in spans]) for text, spans in answer]

    def _answer(self, request: dict) -> list | None:
        for _ in range(2):  # an idle child may just have ended
            if self._num_exceeded >= MAX_EXCEEDED:
                break
            if self._process is None or not self._process.is_running:
                self._process = _Process(self.source)
            try:
                return self._process.ask(request, self._seconds)
            except _Exceeded:
                self._num_exceeded += 1
                break
            except (EOFError, OSError):
                continue
        else:
            self._num_exceeded += 1  # it broke its process
        raise TemplateRefuses("takes too much time or memory for")


class _Exceeded(Exception):
    """The child took too long or too much memory, and was ended."""


class _Process:
    """A child process with a template. It ends with this object."""

    def __init__(self, source: str):
        try:
            self._child = children().start(_command(), **PIPES)
        except OSError as error:
            raise ModelError(
                f"The process that renders this model's chat template cannot be started: {error.strerror}; use prompts "
                "and completions as plain texts, or the bundled model."
            ) from error
        self._end = weakref.finalize(self, _end, self._child)
        try:
            self.ask(source, START_SECONDS)
        except (_Exceeded, EOFError, OSError):
            raise ModelError(
                f"The process that renders this model's chat template does not answer; {fsdecode(get_executable())!r} "
                "must be Python (`multiprocessing.set_executable` sets it)."
            ) from None

    @property
    def is_running(self) -> bool:
        return self._end.alive and self._child.poll() is None

    def ask(self, request: dict | str, seconds: float) -> list | bool | None:
        """Returns the answer to a request, of which the first is the template; None if it raised an error.

        Raises:
            _Exceeded: it took too long or too much memory.
            EOFError, OSError: the process has ended.
        """
        message = json.dumps(request).encode()
        most = templates.MEMORY + templates.MEMORY_PER_BYTE * len(message)
        watch = _Watch(self._child, seconds + len(message) / BYTES_PER_SECOND, most)
        try:
            with watch:
                self._child.stdin.write(b"%d\n" % len(message) + message)
                self._child.stdin.flush()
                answer = self._child.stdout.readline()
            if not answer.endswith(b"\n"):
                raise EOFError
        except BaseException as error:
            self._end()  # what it would answer belongs to no request any more
            if watch.has_ended_it and isinstance(error, Exception):
                raise _Exceeded from None
            raise
        return json.loads(answer)


class _Watch:
    """A context in which a child is ended if it takes too many seconds or bytes.

    Attributes:
        has_ended_it: whether it did.
    """

    def __init__(self, child: subprocess.Popen, seconds: float, memory: int):
        self._child, self._looks, self._memory = child, seconds / _SECONDS_BETWEEN_LOOKS, memory
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sebp-edge chat template", daemon=True)
        self.has_ended_it = False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        # Looks are counted, so that a pause of both processes does not count as time.
        looks = 0
        while not self._done.wait(_SECONDS_BETWEEN_LOOKS):
            looks += 1
            if looks > self._looks or _resident(self._child.pid) > self._memory:
                self.has_ended_it = True
                self._child.kill()
                return


def _resident(process: int) -> int:
    try:
        return psutil.Process(process).memory_info().rss
    except psutil.Error:
        return 0  # it has just ended


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()
    child.stdout.close()
    with suppress(OSError):  # it ended before it read all
        child.stdin.close()


def _command() -> list[str]:
    executable = fsdecode(get_executable() or b"")
    if getattr(sys, "frozen", False):
        if not hasattr(sys, "_MEIPASS"):
            raise ModelError(
                "This model's chat template is rendered in a process of its own, which this frozen app cannot start; "
                "freeze it with PyInstaller, or use the bundled model."
            )
        # The runtime hook in sebp_edge/cli/frozen makes the app the child.
        return [executable, "--sebp-edge-renders-templates"]
    folders = sorted({str(Path(module.__file__).parents[1]) for module in (jinja2, markupsafe)})
    return [executable, "-S", "-P", "-c", _START, json.dumps(folders), templates.__file__]
