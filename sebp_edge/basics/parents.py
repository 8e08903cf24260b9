"""Ends a child process together with the process that started it.

`python parents.py PID COMMAND...` does so for any program: see `children.ending_with_this`. It imports nothing else.
"""

import ctypes
import os
import signal
import sys
import threading
import time

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SECONDS_BETWEEN_LOOKS = 0.2


def starter() -> int | None:
    """Returns the number of the process that started this one; None if it has ended. Called first in a process.

    The parent of an orphan is another process. Whoever has begun no session is in that of the process that started it.
    """
    parent = os.getppid()
    if os.name == "nt":
        return parent
    try:
        is_orphan = os.getsid(parent) != os.getsid(0) != os.getpid()
    except ProcessLookupError:  # it has ended just now
        is_orphan = True
    return None if is_orphan else parent


def wake_when_parent_ends(signum: int) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends, which may be earlier."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signum, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Ends this process at once when its parent ends, or if it has ended already; called by a child that just started.

    The signal comes when the thread that started this process ends, so that must live as long as its process.
    """
    if sys.platform == "linux":
        wake_when_parent_ends(signal.SIGKILL)
    elif os.name != "nt":  # there a job object ends it
        threading.Thread(target=_look_at, args=(parent,), daemon=True).start()
    if os.name != "nt" and os.getppid() != parent:
        os._exit(1)


def _look_at(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def run(parent: int, command: list[str]) -> None:
    """Becomes a program that ends with the parent; without the kernel's signal, starts it and looks at the parent."""
    if sys.platform == "linux":
        end_with_parent(parent)
        os.execvp(command[0], command)
    program = os.spawnvp(os.P_NOWAIT, command[0], command)
    while (ended := os.waitpid(program, os.WNOHANG))[0] == 0:
        if os.getppid() != parent:
            os.kill(program, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    sys.exit(os.waitstatus_to_exitcode(ended[1]))


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
