"""Runs the command line for tests, in this process or in one of its own."""

import json
import re
import subprocess
import sys

from typer.testing import CliRunner

from sebp_edge.cli import app

RECIPE = "r = 4\nlearning_rate = 2e-2\nepochs = 3\nbatch_tokens = 200\ncontext_length = 64\n"
# A background job of a shell ignores SIGINT (under nohup SIGHUP too), and its child processes inherit that.
RESTORE_SIGNALS = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
)
COMMAND = [sys.executable, "-c", f"{RESTORE_SIGNALS}; from sebp_edge.cli import main; main()"]


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def process(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **options)


def records(text):
    return [json.loads(line) for line in text.splitlines()]


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
