"""Interruptions of the command line: by signals, closed readers, and full or closed outputs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import CODE, COMMAND, IS_COLD, RECIPE, process, records, run, start

from sebp_edge import AdapterStore


@pytest.fixture
def store(own_data_folder):
    return AdapterStore()


def test_ctrl_c_that_native_code_reports_as_an_error_of_its_own_is_an_interruption(monkeypatch, store):
    def read_names(store):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(AdapterStore, "names", read_names)
    # A background job ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = run("adapters", "list", "--json")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr == "sebp-edge: Interrupted; nothing was changed.\n"


@pytest.mark.slow
def test_repeated_interruptions_save_one_version_that_is_not_active_and_exit_with_130(
    adapt, recipe, store, after_learning
):
    after_learning(store)
    shared = {".numbers", "where.json"}
    files = [path for path in store.folder.rglob("*") if path.is_file() and shared.isdisjoint(path.parts)]
    before = {path: path.read_bytes() for path in files}
    recipe.write_text(RECIPE.replace("epochs = 1", "epochs = 1000\npatience = 1000"))
    with process(*adapt, "--json", "--fresh") as one:
        for line in one.stdout:
            if json.loads(line).get("epoch", 0) >= 2:
                break
        # Ctrl-C, too, while the best state is being saved.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGINT):
            one.send_signal(number)
            time.sleep(0.02)
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 130
    (job,) = store.jobs.list()
    assert errors == (
        "sebp-edge: Interrupted. The best state so far is saved as version 2 of the adapter 'default'; "
        "it is not active. To activate it: sebp-edge adapters activate default 2; to go on with the training: "
        f"sebp-edge adapt --resume={job.id}\n"
    )
    assert records(output)[-1]["error"] == "Interrupted"
    assert (store.adapter("default").versions(), store.adapter("default").active()) == ([1, 2], 1)
    assert all(path.read_bytes() == content for path, content in before.items())
    store.adapter("default").open(2)


@pytest.mark.slow
def test_a_reader_that_goes_away_interrupts_an_adaptation_and_loses_nothing(adapt, recipe, store):
    recipe.write_text(RECIPE.replace("epochs = 1", "epochs = 1000\npatience = 1000"))
    with process(*adapt) as one:
        for line in one.stdout:
            if line.startswith("  after epoch 1"):
                break
        one.stdout.close()
        assert one.wait(timeout=200) == 130
        assert "best state so far is saved as version 1 of the adapter 'default'" in one.stderr.read()
    assert (store.adapter("default").versions(), store.adapter("default").active()) == ([1], None)


def closed_pipe():
    """Returns a pipe without a reader, for writing."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk():
    return Path("/dev/full").open("w")


# Python and rich buffer, flush and fail in different places.
PRINTING = [
    ["recipes"],
    ["recipes", "--json"],
    ["--help"],
    ["adapters", "list"],
    ["inspect", str(Path(__file__).parents[2] / "recipes"), "--json"],
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PRINTING[1::2], ids=str)
def test_a_reader_that_goes_away_ends_a_list_quietly_as_it_ends_other_programs(arguments):
    with closed_pipe() as gone, process(*arguments, stdout=gone) as one:
        assert one.wait(timeout=200) == 141
        assert one.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", PRINTING[::2], ids=str)
def test_a_full_disk_at_the_output_is_one_sentence(arguments):
    with full_disk() as full, process(*arguments, stdout=full) as one:
        assert one.wait(timeout=200) == 1
        assert one.stderr.read() == "sebp-edge: The output could not be written: No space left on device.\n"


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "as_json"), [(["stderr"], True), (["stdout", "stderr"], False)], ids=str)
def test_an_error_keeps_its_exit_code_if_nobody_reads_it(streams, as_json):
    with closed_pipe() as gone:
        arguments = ("adapters", "show", "none", *["--json"] * as_json)
        with process(*arguments, **dict.fromkeys(streams, gone)) as one:
            output, _ = one.communicate(timeout=200)
    assert one.returncode == 1
    if as_json and streams == ["stderr"]:
        assert records(output)[-1]["error"] == "AdapterError"


@pytest.mark.slow
def test_an_adaptation_whose_result_nobody_reads_says_by_its_exit_code_whether_it_is_kept(adapt, store):
    with process(*adapt, "--json") as one:
        for line in one.stdout:
            if json.loads(line)["event"] == "saved":
                one.stdout.close()
                break
        assert one.wait(timeout=200) in (0, 130)
        errors = one.stderr.read()
    assert store.adapter("default").active() == 1
    assert errors == "" if one.returncode == 0 else "is saved and active" in errors


@pytest.mark.slow
@pytest.mark.parametrize("closed", [[2], [0, 1, 2]], ids=str)
def test_a_process_without_streams_still_works(closed):
    code = (
        f"import os; [os.close(number) for number in {closed}]; os.execvp({sys.executable!r}, {[*COMMAND, 'recipes']})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("notes" in done.stdout) == (1 not in closed)


# ------------------------------------------------------------------------------------------------------ at the start


def has_handlers(one):
    """Whether a process has installed a handler of SIGTERM, for which Python itself has none."""
    status = Path(f"/proc/{one.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("number", "after"), [(signal.SIGINT, 0), (signal.SIGTERM, 0.05), (signal.SIGINT, 0.2)])
def test_an_interruption_while_the_command_starts_is_one_sentence(number, after, tmp_path):
    with process("generate", "the ferry", "--json", cold=True) as one:
        while not has_handlers(one):
            time.sleep(0.001)
        time.sleep(after)
        one.send_signal(number)
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 130
    # A fast machine has said by then which model it uses.
    errors = errors.removeprefix("No adapter 'default' is active; using the base model 'tiny'.\n")
    assert errors == "sebp-edge: Interrupted; nothing was changed.\n"
    assert [record["error"] for record in records(output) if record["event"] != "started"] == ["Interrupted"]


@pytest.mark.slow
def test_an_output_that_fills_up_interrupts_an_adaptation_and_loses_nothing(adapt, recipe, store, tmp_path):
    pytest.importorskip("resource")
    recipe.write_text(RECIPE.replace("epochs = 1", "epochs = 1000\npatience = 1000"))
    limit, left = 2**26, 20_000
    limit_file_size = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    with (tmp_path / "log").open("ab") as log:
        log.truncate(limit - left)
        with start([f"{limit_file_size}; {CODE}", *adapt, "--json"], cold=IS_COLD, stdout=log) as one:
            assert one.wait(timeout=200) == 130
            assert "best state so far is saved as version 1 of the adapter 'default'" in one.stderr.read()
    assert (tmp_path / "log").stat().st_size == limit
    assert (store.adapter("default").versions(), store.adapter("default").active()) == ([1], None)
