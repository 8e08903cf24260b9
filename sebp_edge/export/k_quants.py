"""Quantises with llama.cpp's own program, which has quantisations that the package gguf can only read."""

import shutil
import subprocess
from pathlib import Path

from sebp_edge.basics.stopping import Check
from sebp_edge.errors import ExportError, OptionError

K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
_PROGRAM = "llama-quantize"
_SECONDS_BETWEEN_CHECKS = 0.2


def find_program(quant: str) -> str:
    """Returns the path of the program.

    Raises:
        OptionError: it is not on the path.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise OptionError(
            f"{quant} needs {_PROGRAM}, a program of llama.cpp, which is not on the path; install llama.cpp, or choose "
            "q4_0, q5_0 or q8_0."
        )
    return program


def requantise(source: Path, target: Path, quant: str, check: Check) -> None:
    """Quantises a file in f16.

    Args:
        check: called several times a second; may raise to stop.

    Raises:
        OptionError: the program is not on the path.
        ExportError: it failed.
    """
    command = [find_program(quant), str(source), str(target), quant.upper()]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams) as process:
        try:
            while process.poll() is None:
                check()
                try:
                    process.wait(_SECONDS_BETWEEN_CHECKS)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            raise
    if process.returncode or not target.is_file():
        raise ExportError(f"{_PROGRAM} failed with the code {process.returncode}; nothing was exported.")
