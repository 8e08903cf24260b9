"""Runs other programs in child processes, which a damaged file or a stop may end.

On an exported folder, the process is `python -m sebp_edge.export.child MODULE PID`, which ends with the process of that
number, its parent. It reads a request as JSON from its standard input and writes the answer as JSON; what the program
itself prints is discarded.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import NamedTuple

from sebp_edge.basics.children import PIPES, children
from sebp_edge.basics.parents import end_with_parent
from sebp_edge.errors import ExportError
from sebp_edge.export.export_result import ExportProgress

# Number of likeliest tokens that are compared.
TOP = 20
_SECONDS_BETWEEN_CHECKS = 0.2


class Predicted(NamedTuple):
    """The likeliest tokens after each token of the rows, with log-probabilities; and the token ids of each text."""

    likeliest: list[list[tuple[int, float]]]
    tokens: list[list[int]]


def run(module: str, program: str, request: dict, progress: ExportProgress) -> Predicted:
    """Returns the answer of a module's `_answer` to a request; raises an ExportError if the program failed."""
    code, output = communicate(
        [sys.executable, "-m", __name__, module, str(os.getpid())], json.dumps(request).encode(), progress
    )
    if code:
        raise ExportError(f"{program} cannot read the exported folder: it ended with the code {code}.")
    answer = json.loads(output)
    return Predicted([[tuple(each) for each in row] for row in answer["predicted"]], answer["tokens"])


def communicate(command: list[str], request: bytes, progress: ExportProgress) -> tuple[int, bytes]:
    """Runs a command; returns its exit code and its output. `progress` may stop it several times a second."""
    unsent: bytes | None = request
    started = children()
    with started.start(command, **PIPES) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(unsent, timeout=_SECONDS_BETWEEN_CHECKS)
                    return process.returncode, output
                except subprocess.TimeoutExpired:
                    unsent = None
                    progress.check()
        finally:
            started.kill(process)


def _main() -> None:
    end_with_parent(int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer = importlib.import_module(sys.argv[1])._answer(json.load(sys.stdin), TOP)
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    _main()
