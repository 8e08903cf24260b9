"""Results: an old figure is never called fresh, with or without history."""

import importlib
import json
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

import evidence

# Every benchmark that records something, as its folder and its name.
RECORDED = sorted(
    f"{path.parent.name}.{path.stem}"
    for path in evidence.RESULTS.parent.glob("*/*.py")
    if re.search(r"^SOURCES = ", path.read_text(encoding="utf-8"), re.MULTILINE)
)
GPU = {"gpu": "A GPU", "driver": "1.2", "versions": {"torch": "2.11"}}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two files, where a GPU seems to be."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "one.py").write_text("1")
    (tmp_path / "bench.py").write_text("2")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "machine", lambda on_cpu=False: GPU)
    monkeypatch.delenv("SEBP_EDGE_COMMIT", raising=False)
    return tmp_path


def git(project, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd=project, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(project):
    git(project, "add", ".")
    git(project, "commit", "-qm", "change")
    return git(project, "rev-parse", "HEAD")


def record(project, name="layers", figures=None):
    file = project / "results.json"
    evidence.record(name, ["ops", project / "bench.py"], figures or {"ms": 1.5}, file)
    return file, json.loads(file.read_text())


def test_what_has_not_changed_is_fresh(project):
    file, results = record(project)
    entry = results["layers"]
    assert entry["figures"] == {"ms": 1.5}
    assert entry["gpu"] == "A GPU"
    assert entry["sources"].keys() == {"ops", "bench.py"}
    assert evidence.changes(entry) == []
    assert evidence.report(file).startswith("fresh  layers")


def test_without_history_every_change_shows_and_the_commit_is_the_one_that_was_told(project, monkeypatch):
    monkeypatch.setenv("SEBP_EDGE_COMMIT", "abcdef0123")
    file, results = record(project)
    assert (results["layers"]["commit"], results["layers"]["uncommitted"]) == ("abcdef0123", None)
    (project / "ops" / "one.py").write_text("1 ")
    (project / "ops" / "two.py").write_text("")
    (project / "bench.py").unlink()
    assert evidence.changes(results["layers"]) == ["bench.py is gone", "ops changed"]
    assert evidence.report(file).startswith("stale  layers")


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed"])
def test_a_folder_has_changed_if_one_of_its_python_files_has(project, change):
    _, results = record(project)
    one = project / "ops" / "one.py"
    (project / "ops" / "notes.txt").write_text("no code")
    assert evidence.changes(results["layers"]) == []
    if change == "edited":
        one.write_text("3")
    elif change == "added":
        (project / "ops" / "deep").mkdir()
        (project / "ops" / "deep" / "two.py").touch()
    elif change == "removed":
        one.unlink()
    else:
        one.rename(project / "ops" / "other.py")
    assert evidence.changes(results["layers"]) == ["ops changed"]


BEFORE = '''"""Does it."""


def f(x):
    """Adds one."""
    return x + 1  # as asked
'''


@pytest.mark.parametrize(
    ("after", "is_fresh"),
    [
        (BEFORE.replace("Adds one.", "Adds\n\n    one.").replace("as asked", "why not"), True),
        (BEFORE.replace("Does it.", "#").replace("\n\n\n", "\n# A line.\n"), True),
        (BEFORE.replace("+ 1", "+ 2"), False),
        (BEFORE.replace('"""Adds one."""', '"#"'), True),
        (BEFORE.replace("x + 1", '"#" + x'), False),
        (BEFORE + "f(1)\n", False),
    ],
)
def test_words_make_no_figure_old_and_code_does(project, after, is_fresh):
    (project / "ops" / "one.py").write_text(BEFORE)
    _, results = record(project)
    (project / "ops" / "one.py").write_text(after)
    assert (evidence.changes(results["layers"]) == []) is is_fresh


def test_with_history_a_change_is_named_by_its_commits(project):
    git(project, "init", "-q")
    first = commit(project)
    _, results = record(project)
    entry = results["layers"]
    assert (entry["commit"], entry["uncommitted"]) == (first, False)
    (project / "ops" / "one.py").write_text("3")
    assert evidence.changes(entry) == ["ops changed in no commit yet"]
    assert record(project)[1]["layers"]["uncommitted"] is True
    second = commit(project)[:7]
    assert evidence.changes(entry) == [f"ops changed in {second}"]
    git(project, "mv", "bench.py", "other.py")
    third = commit(project)[:7]
    assert evidence.changes(entry) == [f"bench.py is gone in {third}", f"ops changed in {second}"]


def test_a_new_result_replaces_its_namesake_and_no_other(project):
    record(project, "step", {"ms": 7})
    record(project, "layers", {"ms": 2})
    file, results = record(project, "layers", {"ms": 3})
    assert {name: entry["figures"]["ms"] for name, entry in results.items()} == {"step": 7, "layers": 3}
    assert [path.name for path in project.glob("results.json*")] == [file.name]


def test_a_write_that_fails_leaves_the_old_results(project, limit_files):
    file, results = record(project)
    with limit_files(100), pytest.raises(OSError, match="too large"):
        record(project, figures={"ms": 2})
    assert json.loads(file.read_text()) == results


@pytest.mark.parametrize("name", RECORDED)
def test_all_sources_of_every_benchmark_are_there(name):
    for source in (*importlib.import_module(name).SOURCES, *evidence.TESTS):
        assert (evidence.ROOT / source).exists(), source


def test_all_results_have_a_commit_a_machine_and_the_hashes_of_their_sources():
    results = json.loads(evidence.RESULTS.read_text())
    for entry in results.values():
        assert re.fullmatch("[0-9a-f]{7,40}", entry["commit"])
        assert entry["gpu"] or entry["cpu"]
        assert entry["sources"]
        assert all(re.fullmatch("[0-9a-f]{16}", value) for value in entry["sources"].values())


def test_every_table_belongs_to_a_result():
    tables = {entry["table"] for entry in json.loads(evidence.RESULTS.read_text()).values() if "table" in entry}
    assert tables == {f"results/{path.name}" for path in evidence.RESULTS.parent.glob("results/*.csv")}


def test_the_tests_of_a_session_are_counted_by_outcome_and_by_mark(project):
    for source in evidence.TESTS:
        (project / source).mkdir(parents=True)
    (project / "more.py").touch()
    files = {"bench.py": {"gpu": 1}, "more.py": {"gpu": 1}, "x": {}}
    marked, more, other = (SimpleNamespace(nodeid=f"{file}::test", keywords=files[file]) for file in files)
    file, whole_file = project / "results.json", SimpleNamespace(nodeid="y")
    evidence.record_tests({"passed": [marked, other, other], "skipped": [more, whole_file], "": [other]}, file)
    entry = json.loads(file.read_text())["gpu-tests"]
    assert entry["figures"]["gpu"] == {"passed": 1, "failed": 0, "error": 0, "skipped": 1}
    assert entry["figures"]["all"] == {"passed": 3, "failed": 0, "error": 0, "skipped": 2}
    assert entry["figures"]["wrong"] == []
    assert {"bench.py", "more.py"} <= set(entry["sources"])
    # Those of one file do not take the place of all.
    evidence.record_tests({"failed": [marked, other]}, file)
    results = json.loads(file.read_text())
    assert results["gpu-tests"] == entry
    assert results["bench"]["figures"]["gpu"] == {"passed": 0, "failed": 1, "error": 0, "skipped": 0}
    assert [line.strip() for line in evidence.report(file).splitlines() if line.endswith(" failed")] == [
        "bench.py::test failed",
        "x::test failed",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_no_result_of_one_is_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="this result is a GPU's"):
        evidence.record("layers", [], {}, tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


def test_a_result_of_the_cpu_names_the_cpu_and_its_threads(tmp_path):
    file = tmp_path / "results.json"
    evidence.record("steps", [], {"ms": 1}, file, on_cpu=True)
    entry = json.loads(file.read_text())["steps"]
    assert entry["gpu"] is None and entry["driver"] is None
    assert entry["cpu"].startswith("1 thread of ")
    assert evidence.report(file).endswith(entry["cpu"])
