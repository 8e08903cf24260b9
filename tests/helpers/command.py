"""Runs the command line for tests, in this process or in one of its own."""

import json
import os
import re
import subprocess
import sys

import torch
from typer.testing import CliRunner
from warm import WarmProcess

from sebp_edge.cli.commands import app

RECIPE = "r = 4\nlearning_rate = 2e-2\nepochs = 1\nbatch_tokens = 200\ncontext_length = 64\n"
# A background job of a shell ignores SIGINT (under nohup SIGHUP too), and its child processes inherit that.
RESTORE_SIGNALS = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
)
CODE = f"{RESTORE_SIGNALS}; from sebp_edge.cli import main; main()"
COMMAND = [sys.executable, "-c", CODE]
# With a GPU, imports start threads, which a forked process would lack.
IS_COLD = sys.platform != "linux" or torch.cuda.is_available()


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def process(*arguments, cold=IS_COLD, **options):
    """Starts the command in a process of its own.

    Args:
        cold: whether the process imports what it needs itself, which takes seconds with torch.
    """
    return start([CODE, *arguments], cold=cold, **options)


def python(code, *arguments):
    """Returns what this code prints in a process of its own, which has torch and the package imported."""
    with start([code, *arguments]) as one:
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 0, errors
    return output


def start(arguments, *, cold=IS_COLD, **options):
    """Starts a process that runs the first argument as code, and has the others."""
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    if cold:
        return subprocess.Popen([sys.executable, "-c", *map(str, arguments)], **options)
    return WarmProcess(arguments, **options)


HALT = """
import os, re, signal, sys
def halt(event, arguments):
    if event == {event!r} and re.search({pattern!r}, str(arguments[0])) and not halted:
        halted.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)
halted = []
sys.addaudithook(halt)
"""


def halted(event, pattern, *arguments):
    """Returns the command once it halts before Python's audit event of such a path; SIGCONT makes it go on."""
    one = start([HALT.format(event=event, pattern=pattern) + CODE, *arguments])
    _, status = os.waitpid(one.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return one


def halted_before_it_saves(*arguments):
    """Returns a process that does what is asked until it makes the temporary folder of a version."""
    return halted("os.mkdir", r"\.saving-", *arguments)


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def contents(text):
    """What messages hold besides the time and the job."""
    return [{key: value for key, value in record.items() if key not in ("time", "job")} for record in records(text)]


def assert_one_sentence(result, words, exit_code=1):
    assert result.exit_code == exit_code, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert re.search(words, result.stderr), result.stderr
    assert result.stderr.startswith("sebp-edge: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def without_controls(drawn):
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))
