"""Forbids a process, and all that it starts, to use the internet, so that not even native code can.

    python no_network.py     runs the commands on standard input, one JSON list a line, by `sebp-edge` in this process

A seccomp filter of the Linux kernel kills the process at the attempt: an error could be caught and go unnoticed.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys

# The numbers of socket and io_uring_setup, and the architecture's, in the kernel's headers.
SYSCALLS = {"x86_64": (41, 425, 0xC000003E), "aarch64": (198, 425, 0xC00000B7)}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
SYSCALL, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
NO_NEW_PRIVILEGES, SET_FILTER, FILTERED = 38, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() in SYSCALLS


def forbid() -> None:
    """Kills this process, or one that it starts, when it makes an internet socket; without one, it cannot connect."""
    open_socket, io_uring, architecture = SYSCALLS[platform.machine()]
    kill, allow = 8, 9
    conditions = [
        (LOAD, ARCHITECTURE),
        (architecture, 2, kill),  # the calls of another architecture have other numbers
        (LOAD, SYSCALL),
        (io_uring, kill, 4),  # it could open sockets by another call
        (open_socket, 5, allow),
        (LOAD, FIRST_ARGUMENT),
        (socket.AF_INET, kill, 7),
        (socket.AF_INET6, kill, allow),
    ]
    program = [_instruction(number, *each) for number, each in enumerate(conditions)]
    program += [_Instruction(RETURN, 0, 0, KILL), _Instruction(RETURN, 0, 0, ALLOW)]
    instructions = (_Instruction * len(program))(*program)
    program = _Program(len(instructions), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_FILTER, FILTERED, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel refuses the filter")


def _instruction(number: int, what: int, *targets: int) -> _Instruction:
    """A load of `targets[0]`, or a comparison with `what` that goes on at one of two instructions."""
    if len(targets) == 1:
        return _Instruction(LOAD, 0, 0, targets[0])
    return _Instruction(EQUAL, *(target - number - 1 for target in targets), what)


class _Watched(subprocess.Popen):
    """Ends this process if one that it starts is killed by the filter, which a command might not mention."""

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name == "returncode" and value == -signal.SIGSYS:
            os.kill(os.getpid(), signal.SIGSYS)


def main() -> None:
    from typer.testing import CliRunner

    subprocess.Popen = _Watched
    forbid()
    from warm import shorten_assessment

    from sebp_edge.cli.commands import app

    shorten_assessment()
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps({"begins": arguments}), flush=True)
        result = CliRunner().invoke(app, arguments, input="")
        print(json.dumps({"exit_code": result.exit_code, "output": result.output[-2000:]}), flush=True)


if __name__ == "__main__":
    main()
