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
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
REGISTERS = 65_536
# A thread has 255 registers at most; what some kernels spill was measured to cost less than smaller tiles, or is rare.
MAX_STACK = 512
# All of a training where a program may have least, and where kernels have tiles of their own. 80 has the instructions
# of 86, but larger tiles of products; on 120 each kernel has the shared memory of 86, so that those with most registers
# show that it is compiled for. 89 is left out: each kernel takes what it takes on 86, to the last register.
LARGEST = ["largest heads", "highest ranks in 2 bytes", "products in 2 bytes", "4 bits"]
PARTS = {80: ["products in 2 bytes"], 90: ["training", *LARGEST], 120: ["largest heads", "4 bits"]}
PARTS[86] = [*PARTS[90], "highest ranks in 4 bytes", "products in 4 bytes", "linear attention", "short convolutions"]
PARTS[100] = [*LARGEST, "linear attention"]
LEAST_KERNELS = {80: 2, 86: 28, 90: 22, 100: 13, 120: 5}


@pytest.mark.slow
@pytest.mark.parametrize("architectures", [(86,), (90,), (80, 100, 120)], ids=str)
def test_kernels_fit_each_architecture(architectures, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = json.dumps({each: (SHARED_MEMORY[each], PARTS[each]) for each in architectures})
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    command = [sys.executable, HELPER, asked]
    compiler = subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, **options)
    assert compiler.returncode == 0, compiler.stderr
    kernels = [json.loads(line) for line in compiler.stdout.splitlines()]
    for architecture in architectures:
        compiled = {each["kernel"] for each in kernels if each["architecture"] == architecture}
        assert len(compiled) >= LEAST_KERNELS[architecture]
    for each in kernels:
        assert each["shared"] <= SHARED_MEMORY[each["architecture"]], each
        assert each["registers"] * each["threads"] <= REGISTERS, each
        assert each["stack"] <= MAX_STACK, each
