"""Kernels compile for each architecture, without a GPU, and fit into what one program has there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

HELPER = Path(__file__).parents[1] / "helpers" / "compiled_kernels.py"
# Bytes of shared memory that a program may have: CUDA programming guide, specifications by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
REGISTERS = 65_536
# A thread has 255 registers at most; what some kernels spill was measured to cost less than smaller tiles, or is rare.
MAX_STACK = 512


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit_each_architecture(architecture, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # All of a training where a program may have least, and where kernels have tiles of their own.
    is_whole = architecture in (86, 90)
    command = [sys.executable, HELPER, str(architecture), str(SHARED_MEMORY[architecture]), *["--largest"][is_whole:]]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    compiler = subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, **options)
    assert compiler.returncode == 0, compiler.stderr
    kernels = [json.loads(line) for line in compiler.stdout.splitlines()]
    assert len({each["kernel"] for each in kernels}) >= (20 if is_whole else 9)
    for each in kernels:
        assert each["shared"] <= SHARED_MEMORY[architecture], each
        assert each["registers"] * each["threads"] <= REGISTERS, each
        assert each["stack"] <= MAX_STACK, each
