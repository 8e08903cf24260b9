"""Quantises with llama.cpp's own program, which has quantisations that the package gguf can only read."""

import shutil
from pathlib import Path

from sebp_edge.basics.children import ending_with_this
from sebp_edge.basics.stopping import Check
from sebp_edge.errors import ExportError, OptionError
from sebp_edge.export.child import communicate

K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
_PROGRAM = "llama-quantize"


def find_program(quant: str) -> str:
    """Returns the path of the program; raises an OptionError if it is not there."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise OptionError(
            f"{quant} needs {_PROGRAM}, a program of llama.cpp, which is not on the path; install llama.cpp, or choose "
            "q4_0, q5_0 or q8_0."
        )
    return program


def requantise(source: Path, target: Path, quant: str, check: Check) -> None:
    """Quantises a file in f16; raises an ExportError if the program fails."""
    command = [find_program(quant), str(source), str(target), quant.upper()]
    code, _ = communicate(ending_with_this(command), b"", check)
    if code or not target.is_file():
        raise ExportError(f"{_PROGRAM} failed with the code {code}; nothing was exported.")
