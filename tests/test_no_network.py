"""Nothing leaves the machine: every command runs where the kernel kills a process that opens an internet socket."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import no_network
import pytest
import typer
from command import app

pytestmark = pytest.mark.skipif(not no_network.is_supported(), reason="needs seccomp of Linux on x86-64 or ARM")

RUNNER = Path(no_network.__file__)


def commands_of(group, before=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*before, name))
        else:
            yield (*before, name)


def run_offline(commands, tmp_path):
    """Runs commands one after the other in a process without network; returns its exit code and what it wrote."""
    # The tests' own setting would keep the Hub's client from trying.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    lines = "".join(json.dumps([str(each) for each in command]) + "\n" for command in commands)
    child = subprocess.run(
        [sys.executable, RUNNER],
        input=lines,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    return child.returncode, [json.loads(line) for line in child.stdout.splitlines()], child.stderr


@pytest.mark.slow
def test_no_command_opens_an_internet_socket_except_to_download_a_model(notes_folder, model_folder, recipe, tmp_path):
    model = ["--model", model_folder, "--recipe", recipe, "--device", "cpu"]
    invocations = {
        ("adapt",): [notes_folder, *model, "--epochs", 1, "--activate-anyway"],
        ("inspect",): [notes_folder, *model],
        ("plan",): [notes_folder, *model],
        ("analyze",): [notes_folder, *model, "--examples", 1],
        ("generate",): ["The ferry", "--model", model_folder, "--max-tokens", 2],
        ("ask",): ["Where is the ferry?", notes_folder, "--model", model_folder],
        ("export",): ["default", "--model", model_folder, "--to", tmp_path / "merged", "--format", "merged"],
        ("models",): [],
        ("recipes",): [],
        ("doctor",): [],
        ("client", "ts"): [tmp_path / "client"],
        ("adapters", "list"): [],
        ("adapters", "show"): ["default"],
        ("adapters", "report"): ["default"],
        ("adapters", "diff"): ["default", 1, 1],
        ("adapters", "export"): ["default", "--to", tmp_path / "archive"],
        ("adapters", "import"): [tmp_path / "archive"],
        ("adapters", "activate"): ["default", 2],
        ("adapters", "rollback"): ["default"],
        ("forget",): [
            "note-00.md",
            "--texts",
            notes_folder,
            *model[:2],
            "--device",
            "cpu",
            "--yes",
            "--activate-anyway",
        ],
        ("adapters", "rename"): ["default", "other"],
        ("adapters", "gc"): ["--yes"],
        ("adapters", "remove"): ["other", "--yes"],
    }
    download = ["adapt", notes_folder, "--model", "nobody/no-such-model-here"]
    # A new command needs an invocation here. None is left out: those that take a model's name get a folder.
    # The server's ends are its own process's, and what its worker does is what these commands do; no job is left.
    elsewhere = {("serve",), ("jobs", "remove")}
    assert set(commands_of(typer.main.get_command(app))) == set(invocations) | elsewhere
    commands = [[*name, *arguments] for name, arguments in invocations.items()]
    code, written, errors = run_offline([*commands, download], tmp_path)
    # Only the last command, which asks the Hub, ends the process, before it has a result.
    assert (code, len(written)) == (-signal.SIGSYS, 2 * len(invocations) + 1), (written[-1:], errors)
    # Only doctor may find that something needs attention.
    codes = {name: result["exit_code"] for name, result in zip(invocations, written[1::2], strict=True)}
    failed = {name for name, code in codes.items() if code} - {("doctor",)}
    assert not failed, [result["output"] for result in written[1::2] if result["exit_code"]]


CAUGHT = """
import socket
try:
    socket.create_connection(("127.0.0.1", 9))
except BaseException:
    pass
"""
NATIVE = "import ctypes; ctypes.CDLL(None).socket(10, 1, 0)"
STARTED = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CAUGHT!r}])"


@pytest.mark.parametrize("code", [CAUGHT, NATIVE, STARTED])
def test_an_attempt_to_connect_is_found_even_if_it_is_caught_or_in_another_process(code):
    watched = f"import no_network, subprocess; subprocess.Popen = no_network._Watched; no_network.forbid(); {code!s}"
    if code is not NATIVE:
        watched = watched.replace(f"; {code!s}", f"\n{code}")
    child = subprocess.run([sys.executable, "-c", watched], cwd=RUNNER.parent, capture_output=True, check=False)
    assert child.returncode == -signal.SIGSYS


def test_what_stays_on_the_machine_is_allowed():
    code = "import no_network, socket; no_network.forbid(); socket.socketpair()"
    subprocess.run([sys.executable, "-c", code], cwd=RUNNER.parent, check=True)
