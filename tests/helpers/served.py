"""Starts `sebp-edge serve` for tests, and speaks with it line by line."""

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from select import select

import psutil
import pytest
from command import IS_COLD, start
from held_jobs import holding

from sebp_edge.serve.served_jobs import ENDED

COMMAND = [sys.executable, "-m", "sebp_edge.serve"]
# A server, its workers and its planners without the seconds that imports take each of them; they are its children.
WARM = """
import held_jobs, warm
held_jobs.hold_where_told()
warm.fork_from_here()
from sebp_edge.basics.children import Children
start = Children.start
def start_warm(children, command, **options):
    for module, code in {children!r}.items():
        if module in command:
            return warm.WarmProcess([code, command[-1]], **options)
    return start(children, command, **options)
Children.start = start_warm
from sebp_edge.serve.__main__ import main
main()
"""
CHILD = """
import os, sys, time
os.setsid()
until = time.monotonic() + 10
while os.getppid() != int(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.001)
from {module} import main
main()
"""
WORKER, PLANNER = (f"sebp_edge.serve.{name}" for name in ("worker", "planner"))
CHILDREN = {module: CHILD.format(module=module) for module in (WORKER, PLANNER)}
# An app starts it as its server. It gives its streams to a warm one that the tests start, and ends with its exit code.
LAUNCHER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as tests:
    tests.connect(chr(0) + sys.argv[1])
    socket.send_fds(tests, [b"x"], [0, 1])
    os.close(0), os.close(1)
    sys.exit(int(tests.recv(10) or 1))
"""
# A machine that runs other tests too would leave nothing to a worker of low priority.
AS_USUAL = "import sebp_edge.serve.worker_tasks; sebp_edge.serve.worker_tasks.lower_priority_of_thread = lambda: None\n"
# What a machine that runs other tests too may take; nothing waits for so long that is not broken.
SECONDS = 120


class Refused(Exception):
    """The server answered with an error; `error` has it."""

    def __init__(self, error):
        super().__init__(error["message"])
        self.error, self.code = error, error["data"]["code"]


def start_server(*, command=COMMAND, warm=False, first="", **options):
    """Starts a server.

    Args:
        warm: whether its workers have everything imported when they start, and what is assessed is shortened.
        first: code that a warm server runs first.
    """
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
    if warm and not IS_COLD:
        return start([first + WARM.format(children=CHILDREN)], stderr=None, text=False, **options)
    return subprocess.Popen(command, **options)


class WarmServers:
    """Warm servers for apps that start their server themselves, with workers of usual priority; a context manager.

    Attributes:
        command: starts a server.
        started: the servers, in order.
    """

    def __init__(self):
        name = f"sebp-edge-tests-{os.getpid()}-{id(self)}"
        self.command = COMMAND if IS_COLD else [sys.executable, "-I", "-S", "-c", LAUNCHER, name]
        self.started = []
        if not IS_COLD:
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind("\0" + name)
            self._listening.listen()
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=self._serve, args=self._listening.accept()[:1], daemon=True).start()

    def _serve(self, launcher):
        with launcher:
            _, streams, _, _ = socket.recv_fds(launcher, 1, 2)
            if not streams:  # the app has killed it already
                return
            process = start_server(warm=True, first=AS_USUAL, stdin=streams[0], stdout=streams[1])
            for stream in streams:
                os.close(stream)
            self.started.append(process)
            while process.poll() is None:
                if select([launcher], [], [], 0.01)[0]:  # the app has killed it
                    process.kill()
                    process.wait()
            with contextlib.suppress(BrokenPipeError):
                launcher.sendall(str(process.returncode).encode())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if not IS_COLD:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
        for process in self.started:
            process.kill()
            process.wait(SECONDS)


class Server:
    """A server as an app sees it, see `start_server`. Messages that nobody has waited for yet are kept."""

    def __init__(self, **options):
        self.process = start_server(**options)
        self._arrived, self._kept, self._numbers = queue.SimpleQueue(), [], itertools.count(1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._arrived.put(json.loads(line))
        self._arrived.put(None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)  # a stream that is closed while it is read raises in the thread
        self.process.stdout.close()

    def write(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, method, number=None, **params):
        """Sends a request; returns its number."""
        number = next(self._numbers) if number is None else number
        self.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode() + b"\n")
        return number

    def wait(self, wanted):
        """Returns the first message that `wanted` accepts."""
        for message in self._kept:
            if wanted(message):
                self._kept.remove(message)
                return message
        until = time.monotonic() + SECONDS
        while True:
            message = self._arrived.get(timeout=until - time.monotonic())
            if message is None:
                self._arrived.put(None)
                raise EOFError("the server has ended")
            if wanted(message):
                return message
            self._kept.append(message)

    def answer(self, number):
        """Returns the result of a request; raises Refused."""
        message = self.wait(lambda message: message.get("id") == number and "method" not in message)
        if "error" in message:
            raise Refused(message["error"])
        return message["result"]

    def call(self, method, **params):
        return self.answer(self.send(method, **params))

    def initialize(self, **settings):
        return self.call("initialize", **{"protocol": 1, "low_priority": False} | settings)

    def start_job(self, id, **options):
        """Starts a job whose events are sent."""
        self.call("jobs.start", id=id, **options)
        self.call("jobs.subscribe", id=id)

    @contextlib.contextmanager
    def held(self, id, event, number=1, **options):
        """Context of a job that is started, and waits after an event, see `held_jobs`; yields the event."""
        if IS_COLD:
            pytest.skip("holds jobs of workers that are forked: needs Linux, without a GPU")
        with holding(self.process.pid, id, event, number):
            self.start_job(id, **options)
            yield [self.event(id, lambda told: told["event"] == event) for _ in range(number)][-1]

    def event(self, job, wanted=lambda event: True):
        """Returns the next event of a job that `wanted` accepts."""
        return self.wait(
            lambda message: (
                message.get("method") == "job.event"
                and message["params"]["job"] == job
                and wanted(message["params"]["event"])
            )
        )["params"]

    def state(self, job, states=ENDED | {"paused"}):
        """Waits until a job has one of these states; returns the event."""
        return self.event(job, lambda event: event.get("state") in states)["event"]

    def worker(self):
        """Returns the number of the worker's process, once there is one; None if there is none."""
        return (self.call("status")["worker"] or {}).get("pid")


def refused(server, method, **params):
    """Returns the error of a request, which is refused."""
    try:
        server.call(method, **params)
    except Refused as error:
        return error
    raise AssertionError(f"{method} is not refused")


def processes_below(pid):
    """Returns a process and all that it has started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(processes):
    """Whether all processes end; zombies have ended."""
    until = time.monotonic() + SECONDS
    while True:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > until:
            return not left
        time.sleep(0.02)


def wait_until(is_so):
    """Waits until a condition holds."""
    until = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def rss(pid):
    """Returns the resident memory of a process in bytes."""
    return psutil.Process(pid).memory_info().rss


def environment(**changes):
    return dict(os.environ) | changes
