"""No program that this one starts outlives it: llama-quantize, by a stand-in, after `kill -9`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command import process
from served import Server, all_gone, environment, wait_until

from sebp_edge.basics.children import children, ending_with_this
from sebp_edge.cli import frozen

posix = pytest.mark.skipif(os.name == "nt", reason="a job object does this on Windows")
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the program is watched")


@pytest.fixture
def program(tmp_path):
    """A program that tells its number and does not end."""
    path = tmp_path / "bin" / "llama-quantize"
    path.parent.mkdir()
    number = tmp_path / "number"
    path.write_text(f"#!/bin/sh\necho $$ > {number}.new\n/bin/mv {number}.new {number}\nexec /bin/sleep 1000\n")
    path.chmod(0o755)
    return path


def started(program, starter):
    """Waits until the program runs; returns it."""
    number = program.parents[1] / "number"
    wait_until(lambda: number.exists() or starter.poll() is not None)
    return psutil.Process(int(number.read_text()))


@posix
def test_a_program_ends_with_the_process_that_started_it(program):
    code = (
        "import sys; from sebp_edge.basics.children import children, ending_with_this\n"
        "children().start(ending_with_this(sys.argv[1:])).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(program)]) as starter:
        running = started(program, starter)
        starter.kill()
        assert all_gone([running])


@posix
def test_a_program_has_its_arguments_streams_and_exit_code():
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(7)"
    command = ending_with_this([sys.executable, "-c", code, "--a b", ""])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with children().start(command, **pipes) as one:
        assert one.communicate("typed")[0] == "['--a b', ''] typed\n"
        assert one.returncode == 7


@posix
def test_a_frozen_app_becomes_the_program():
    hook = Path(frozen.__file__).parent / "rthooks" / "pyi_rth_sebp_edge.py"
    command = [sys.executable, hook, "--sebp-edge-runs", str(os.getpid()), "/bin/sh", "-c", "exit 7"]
    assert subprocess.run(command).returncode == 7


@posix
def test_a_program_is_killed_with_what_it_started(tmp_path):
    code = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
    own = children()
    with own.start(ending_with_this([sys.executable, "-c", code]), stdout=subprocess.PIPE) as one:
        child = psutil.Process(int(one.stdout.readline()))
        assert own.kill(one) == -signal.SIGKILL
        assert all_gone([child])
        assert own.kill(one) == -signal.SIGKILL  # nothing is done again


@linux
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["command", "server"])
def test_llama_quantize_ends_with_an_export_that_is_killed(killed, program, store_of_notes, model_folder, tmp_path):
    shutil.copytree(store_of_notes.folder.parent, tmp_path / "sebp-edge")
    own = environment(PATH=f"{program.parent}:{os.environ['PATH']}", XDG_DATA_HOME=str(tmp_path))
    target = tmp_path / "out"
    if killed == "command":
        options = ("--to", target, "--quant", "q4_k_m", "--model", model_folder)
        with process("export", "default", *options, env=own) as command:
            running = started(program, command)
            command.kill()
            assert all_gone([running])
        return
    with Server(warm=True, env=own) as server:
        server.initialize(store=str(tmp_path / "sebp-edge"), folders=[str(tmp_path), str(model_folder)])
        params = {"name": "default", "to": str(target), "quant": "q4_k_m", "model": str(model_folder)}
        server.call("jobs.start", id="exported", kind="export", params=params | {"device": "cpu"})
        running = started(program, server.process)
        server.process.kill()
        assert all_gone([running])
