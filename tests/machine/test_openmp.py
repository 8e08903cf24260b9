"""Threads of OpenMP spin only briefly while they wait, in the command and in a server's worker."""

import json
import os
import re
import subprocess
import sys

import pytest
from command import start

from sebp_edge.basics.openmp import SPINS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="needs torch's build with GNU's OpenMP, which tells its settings"
    ),
]
GENERATE = (
    "import sys; sys.argv[1:] = ['generate', 'a boat', '--max-tokens', '1']; from sebp_edge.cli import main; main()"
)


def environment(**own):
    """The tests' environment, in which OpenMP tells its settings when it is loaded."""
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return kept | {"OMP_DISPLAY_ENV": "verbose"} | own


def spins(told):
    """The turns in each list of settings that OpenMP told."""
    return set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told))


def test_the_command_sets_it_before_torch_is_imported():
    with start([GENERATE], cold=True, env=environment()) as one:
        _, told = one.communicate(timeout=200)
    assert one.returncode == 0 and spins(told) == {SPINS}


@pytest.mark.parametrize("own", [{"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "passive"}], ids=str)
def test_what_the_user_has_set_stays(own):
    with start([GENERATE], cold=True, env=environment(**own)) as one:
        _, told = one.communicate(timeout=200)
    assert one.returncode == 0 and spins(told) == {own.get("GOMP_SPINCOUNT", "0")}


def test_a_worker_sets_it_too(tmp_path):
    params = {"prompt": "a boat", "max_new_tokens": 1, "model": "tiny", "device": "cpu"}
    tasks = [
        {"do": "settings", "store": str(tmp_path), "memory_budget": None, "low_priority": False},
        {"do": "answer", "id": 1, "method": "generate", "params": params},
    ]
    command = [sys.executable, "-m", "sebp_edge.serve.worker", str(os.getpid())]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        ) as worker,
    ):
        for task in tasks:
            print(json.dumps(task), file=worker.stdin, flush=True)
        assert any(json.loads(line)["tells"] == "answer" for line in worker.stdout)
        worker.stdin.close()
        worker.wait(200)
        errors.seek(0)
        assert spins(errors.read()) == {SPINS}
