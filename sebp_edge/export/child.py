"""Runs another program on an exported folder in a child process, which a damaged file or a stop may end.

The process is `python -m sebp_edge.export.child MODULE`. It reads a request as JSON from its standard input and writes
the answer as JSON; what the program itself prints is discarded.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import NamedTuple

from sebp_edge.basics.stopping import Check
from sebp_edge.errors import ExportError

# Number of likeliest tokens that are compared.
TOP = 20
_SECONDS_BETWEEN_CHECKS = 0.2


class Predicted(NamedTuple):
    """What a program computes.

    Attributes:
        likeliest: after each token of the rows, the likeliest tokens and their log-probabilities.
        tokens: the token ids of each text.
    """

    likeliest: list[list[tuple[int, float]]]
    tokens: list[list[int]]


def run(module: str, program: str, request: dict, check: Check) -> Predicted:
    """Returns the answer of a module's `_answer` to a request.

    Args:
        check: called several times a second; may raise to stop.

    Raises:
        ExportError: the program failed.
    """
    command = [sys.executable, "-m", __name__, module]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        try:
            output, _ = _communicate(process, json.dumps(request), check)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ExportError(f"{program} cannot read the exported folder: it ended with the code {process.returncode}.")
    answer = json.loads(output)
    return Predicted([[tuple(each) for each in row] for row in answer["predicted"]], answer["tokens"])


def _communicate(process: subprocess.Popen, request: str, check: Check) -> tuple[str, str]:
    unsent: str | None = request
    while True:
        try:
            return process.communicate(unsent, timeout=_SECONDS_BETWEEN_CHECKS)
        except subprocess.TimeoutExpired:
            unsent = None
            check()


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer = importlib.import_module(sys.argv[1])._answer(json.load(sys.stdin), TOP)
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    _main()
