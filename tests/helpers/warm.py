"""Starts Python processes in a tenth of a second: forks them from one that has torch and this package imported.

A test sees a process as any other, its own child: with its exit code, signals, streams and environment. What happens
before and during imports, and while Python takes its modules apart at the end, needs a cold start.

    python warm.py DESCRIPTOR     forks at each request on this socket, until its other end is closed
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SET_CHILD_SUBREAPER = 36
# What commands import once they need it.
IMPORTED_LATE = (
    *("sebp_edge.cli.commands", "sebp_edge.cli.progress", "sebp_edge.personalizer", "sebp_edge.cli.local_model"),
    *("transformers.models.llama.modeling_llama", "typer._adapters", "rich.status", "sebp_edge.serve.worker_tasks"),
)
# In bytes.
LONGEST_REQUEST, LONGEST_REPLY = 2**17, 100


class WarmProcess(subprocess.Popen):
    """Like `subprocess.Popen([sys.executable, "-c", code, *arguments])`, given `[code, *arguments]`.

    Takes standard streams, `cwd` and `env` only.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        pipes = rest[3:9]
        streams = [ours if given == -1 else given for ours, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "arguments": [*map(str, args)],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
        }
        self.pid = _forker().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class _Forker:
    """The process that has everything imported; it ends with this one."""

    def __init__(self):
        # Processes whose parents have ended become children of this one.
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._start(theirs)

    def _start(self, theirs: socket.socket) -> None:
        number = theirs.fileno()
        # NumPy's library would start threads when it is imported.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, __file__, str(number)], pass_fds=[number], env=environment)
        atexit.register(self._end)

    def fork(self, request: dict, streams: list[int]) -> int:
        """Starts a process with these standard streams; returns its number."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            return int(self._socket.recv(LONGEST_REPLY))

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


class _Copy(_Forker):
    """A copy of this process, which has everything imported itself."""

    def _start(self, theirs: socket.socket) -> None:
        if os.fork():
            return
        self._socket.close()
        with Path(os.devnull).open("r+b", buffering=0) as null:
            for number in range(3):
                os.dup2(null.fileno(), number)
        serve(theirs)
        sys.exit()


_forkers: list[_Forker] = []


def _forker() -> _Forker:
    if not _forkers:
        _forkers.append(_Forker())
    return _forkers[0]


def fork_from_here() -> None:
    """Makes this process, which was forked itself and has no other thread, the one that its own are forked from."""
    _forkers[:] = [_Copy()]


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    import_everything()
    serve(requests)


def serve(requests: socket.socket) -> None:
    """Serves requests; runs the code of a request in the process that it forks for it."""
    while True:
        content, streams, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 3)
        if not content:
            os._exit(0)  # at once, where an exit takes seconds on a busy machine
        reading, writing = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if child := os.fork():
                os.write(writing, str(child).encode())
                os._exit(0)
            while os.getppid() == middle:  # else it would see that one as its parent
                time.sleep(0.001)
            break
        os.waitpid(middle, 0)  # now its child is the test's
        requests.send(os.read(reading, LONGEST_REPLY))
        for descriptor in (reading, writing, *streams):
            os.close(descriptor)
    requests.close()
    status = 0
    try:
        exec(become(json.loads(content), streams), {"__name__": "__main__"})
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    end_at_once(status)


def end_at_once(status: int) -> None:
    """Ends this process as Python does, but leaves out taking all modules apart, which takes half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # Python reports it
    os._exit(status)


def import_everything() -> None:
    """Imports what commands import, and nothing that starts a thread, which a forked process would lack."""
    gc.disable()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    shorten_assessment()
    gc.freeze()
    gc.enable()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert len(names) == 1, names


def shorten_assessment() -> None:
    """Shortens what is assessed of adaptations, as in the tests' own process."""
    for path, value in importlib.import_module("quick").SHORT_ASSESSMENT.items():
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(module), name, value)


def become(request: dict, streams: list[int]) -> str:
    """Makes this process what a new one would be that was given these streams; returns the code that it shall run."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As Python makes them: those of the parent know whether its own could seek, and were terminals.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    code, *sys.argv[1:] = request["arguments"]
    sys.argv[0] = "-c"
    # A background job of a shell ignores SIGINT, under nohup SIGHUP too, and its child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    main()
