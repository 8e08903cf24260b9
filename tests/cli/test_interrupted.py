"""Interruptions of the command line: by signals, closed readers, and full or closed outputs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import RECIPE, process, records, run

from sebp_edge.adapters.store import AdapterStore


@pytest.fixture
def store(own_data_folder):
    return AdapterStore()


def test_ctrl_c_that_native_code_reports_as_an_error_of_its_own_is_an_interruption(monkeypatch, store):
    def read_names(store):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    monkeypatch.setattr(AdapterStore, "names", read_names)
    result = run("adapters", "list", "--json")
    assert result.exit_code == 130
    assert result.stderr == "sebp-edge: Interrupted; nothing was changed.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interruption_saves_a_version_that_is_not_active_and_exits_with_130(adapt, recipe, store, number):
    assert run(*adapt).exit_code == 0
    files = [path for path in store.folder.rglob("*") if path.is_file() and ".numbers" not in path.parts]
    before = {path: path.read_bytes() for path in files}
    recipe.write_text(RECIPE.replace("epochs = 3", "epochs = 1000\npatience = 1000"))
    with process(*adapt, "--json") as one:
        for line in one.stdout:
            if json.loads(line).get("epoch", 0) >= 2:
                break
        one.send_signal(number)
        output, errors = one.communicate(timeout=60)
    assert one.returncode == 130
    assert errors == (
        "sebp-edge: Interrupted. The best state so far is saved as version 2 of the adapter 'default'; "
        "it is not active. To activate it: sebp-edge adapters activate default 2\n"
    )
    assert records(output)[-1]["error"] == "Interrupted"
    assert (store.versions("default"), store.active_version("default")) == ([1, 2], 1)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert run("generate", "the ferry", "--version", 2, "--name", "default", "--model", adapt[3]).exit_code == 0


def test_a_reader_that_goes_away_interrupts_an_adaptation_and_loses_nothing(adapt, recipe, store):
    recipe.write_text(RECIPE.replace("epochs = 3", "epochs = 1000\npatience = 1000"))
    with process(*adapt) as one:
        for line in one.stdout:
            if line.startswith("  after epoch 1"):
                break
        one.stdout.close()
        assert one.wait(timeout=60) == 130
        assert "best state so far is saved as version 1 of the adapter 'default'" in one.stderr.read()
    assert (store.versions("default"), store.active_version("default")) == ([1], None)


def test_a_reader_that_goes_away_ends_a_list_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    with process("recipes", stdout=writing) as one:
        os.close(writing)
        assert one.wait(timeout=60) == 1
        assert one.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--json"]], ids=" ".join)
def test_a_full_disk_at_the_output_is_one_sentence(arguments):
    with Path("/dev/full").open("w") as full, process(*arguments, stdout=full) as one:
        assert one.wait(timeout=60) == 1
        assert one.stderr.read() == "sebp-edge: The output could not be written: No space left on device.\n"


def test_a_process_without_streams_still_works():
    closed = "import os, sys; os.close(1); os.close(2); sys.stdout = sys.stderr = None; "
    code = f"{closed}from sebp_edge.cli import main; main()"
    assert subprocess.run([sys.executable, "-c", code, "recipes"], timeout=60).returncode == 0


def test_an_output_that_fills_up_interrupts_an_adaptation_and_loses_nothing(adapt, recipe, store, tmp_path):
    resource = pytest.importorskip("resource")
    recipe.write_text(RECIPE.replace("epochs = 3", "epochs = 1000\npatience = 1000"))
    limit, left = 2**26, 20_000

    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with (tmp_path / "log").open("ab") as log:
        log.truncate(limit - left)
        with process(*adapt, "--json", stdout=log, preexec_fn=limit_file_size) as one:
            assert one.wait(timeout=60) == 130
            assert "best state so far is saved as version 1 of the adapter 'default'" in one.stderr.read()
    assert (tmp_path / "log").stat().st_size == limit
    assert (store.versions("default"), store.active_version("default")) == ([1], None)
