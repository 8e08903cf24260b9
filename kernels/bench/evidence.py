"""Records what was measured, where and at which commit, and reports whether the code has changed since.

    python kernels/bench/evidence.py        reports per result: fresh or stale, the changed sources with their commits,
                                            and the tests that failed

Results are in results.json. Each contains hashes of the files and folders that it depends on, computed where it was
measured, so that an old figure cannot look new in a copy without history or through an uncommitted change.
"""

import argparse
import ast
import csv
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "kernels" / "bench" / "results.json"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LIBRARIES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "deepspeed", "liger_kernel", "unsloth")
OPS = ("kernels/ops",)
STEP = (*OPS, *(f"sebp_edge/{folder}" for folder in ("engine/sparse", "engine/memory", "engine/training")))
TESTS = (*STEP, "sebp_edge/engine/models", "sebp_edge/machine")
# The most commits that are named for a change.
COMMITS = 5


def main() -> None:
    print(report(RESULTS))


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns the parser of a script with this docstring; --record [FILE] records the script's result."""
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--record", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    return found


def show(row: dict) -> dict:
    """Prints a row of a result; returns it."""
    values = (f"{name} {format(value, '.4g') if isinstance(value, float) else value}" for name, value in row.items())
    print(*values, sep=", ", flush=True)
    return row


def record(
    name: str,
    sources: Iterable[str | Path],
    figures: dict | list[dict],
    file: Path | None,
    on_cpu: bool = False,
) -> None:
    """Records one result under its name, replacing an earlier one; other results in `file` stay.

    Args:
        name: name of the result, usable as a file name.
        sources: files and folders of the project that the figures depend on; a folder stands for its Python files.
        figures: the measurements; a list of rows goes to results/<name>.csv beside `file`, and the entry names it.
        file: the JSON file, created if missing; None records nothing.
        on_cpu: whether the CPU was measured instead of the GPU.

    Raises:
        RuntimeError: there is no GPU, and not `on_cpu`.
        FileNotFoundError: a source is missing.
    """
    if file is None:
        return
    sources = sorted({_relative(source) for source in sources})
    entry = {
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **_commit(sources),
        **machine(on_cpu),
        "sources": {source: hash_of(source) for source in sources},
    }
    if isinstance(figures, list):
        table = file.parent / "results" / f"{name}.csv"
        _write(table, figures)
        entry["table"] = table.relative_to(file.parent).as_posix()
    else:
        entry["figures"] = figures
    results = json.loads(file.read_text()) if file.exists() else {}
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(results | {name: entry}, indent=1, sort_keys=True) + "\n")
    part.replace(file)  # whole or not at all


def record_tests(outcomes: dict[str, list], file: Path) -> None:
    """Records the outcomes of a pytest session: counts for GPU tests and for all tests, and the tests that failed.

    The result is named after the test file if all GPU tests are in one, else "gpu-tests".

    Args:
        outcomes: pytest's reports by outcome.
        file: see `record`.
    """
    reports = {name: outcomes.get(name, []) for name in ("passed", "failed", "error", "skipped")}
    # The report of a file that is skipped as a whole has no keywords.
    on_gpu = {
        name: [each for each in found if "gpu" in getattr(each, "keywords", ())] for name, found in reports.items()
    }
    figures = {
        "gpu": {name: len(found) for name, found in on_gpu.items()},
        "all": {name: len(found) for name, found in reports.items()},
        "wrong": [report.nodeid for name in ("failed", "error") for report in reports[name]],
    }
    files = {report.nodeid.split("::")[0] for found in on_gpu.values() for report in found}
    name = Path(*files).stem if len(files) == 1 else "gpu-tests"
    record(name, [*TESTS, *files], figures, file)


def machine(on_cpu: bool = False) -> dict:
    """The GPU with its driver, None if the CPU was measured; the CPU; and the versions of the relevant libraries.

    Raises:
        RuntimeError: there is no GPU, and not `on_cpu`.
    """
    import torch

    if on_cpu:
        gpu = {"gpu": None, "driver": None}
    elif torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        gpu = {"gpu": torch.cuda.get_device_name(), "driver": driver.split("\n")[0].strip() or None}
    else:
        raise RuntimeError("There is no CUDA GPU here, and this result is a GPU's; leave the recording out.")
    return gpu | {"cpu": _cpu(torch.get_num_threads()), "versions": _versions()}


def hash_of(source: str) -> str:
    """The first 16 hexadecimal digits of SHA-256 of a file, or of the paths and contents of a folder's Python files.

    Docstrings, comments and blank lines of Python files do not count: words make no figure old.

    Raises:
        FileNotFoundError: the source is not there.
    """
    path = ROOT / source
    if not path.is_dir():
        return hashlib.sha256(_content(path)).hexdigest()[:16]
    lines = (
        f"{file.relative_to(path).as_posix()} {hashlib.sha256(_content(file)).hexdigest()}\n"
        for file in sorted(path.rglob("*.py"))
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _content(path: Path) -> bytes:
    """What counts of a file."""
    return code_of(path.read_text(encoding="utf-8")).encode() if path.suffix == ".py" else path.read_bytes()


@functools.cache
def code_of(text: str) -> str:
    """Python code without docstrings, comments and blank lines; the same text for every version of Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            # A docstring on the line of its function stays.
            if docstring.lineno > getattr(node, "lineno", 0):
                for line in range(docstring.lineno - 1, docstring.end_lineno):
                    lines[line] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def changes(entry: dict) -> list[str]:
    """One sentence for each source of an entry that changed or disappeared since it was recorded."""
    found = []
    for source, before in entry["sources"].items():
        if not (ROOT / source).exists():
            found.append(f"{source} is gone{_commits(source, entry['commit'])}")
        elif hash_of(source) != before:
            found.append(f"{source} changed{_commits(source, entry['commit'])}")
    return found


def report(file: Path) -> str:
    """One line per result in `file`, one per change that made it stale, and one per failed test."""
    if not file.exists():
        return f"No results yet: {file.name} is not there."
    lines = []
    for name, entry in json.loads(file.read_text()).items():
        found = changes(entry)
        commit = (entry["commit"] or "no commit")[:7] + ("+" if entry["uncommitted"] else "")
        where = entry["gpu"] or entry["cpu"]
        lines.append(f"{'stale' if found else 'fresh'}  {name:29} {entry['recorded'][:10]}  {commit:9}  {where}")
        failed = [f"{test} failed" for test in entry.get("figures", {}).get("wrong", [])]
        lines += [f"         {each}" for each in found + failed]
    return "\n".join(lines)


def _command() -> str:
    """The command that started this process, with absolute paths cut to their last part."""
    words = (word if not Path(word).is_absolute() else Path(word).name for word in sys.orig_argv[1:])
    return " ".join(["python", *words])


def _relative(path: str | Path) -> str:
    """A path relative to the project's root; a path outside the project stays absolute."""
    path = (ROOT / path).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def _commit(sources: list[str]) -> dict:
    """The measured commit, and whether a source differs from it; None for what is unknown.

    SEBP_EDGE_COMMIT names the commit of a copy without history; the hashes show whether that is true.
    """
    commit, stated = _git("rev-parse", "HEAD"), os.environ.get("SEBP_EDGE_COMMIT")
    if commit is None or stated is not None:
        return {"commit": stated, "uncommitted": None}
    return {"commit": commit, "uncommitted": bool(_git("status", "--porcelain", "--", *sources))}


def _commits(source: str, since: str | None) -> str:
    """The commits since `since` that changed a source, as " in <commits>"; "" if the history does not name any."""
    hashes = _git("log", "--format=%h", "--abbrev=7", f"{since}..", "--", source)
    if hashes is None:
        return ""
    commits = hashes.split()
    named = commits[:COMMITS] + ([f"{len(commits) - COMMITS} more"] if len(commits) > COMMITS else [])
    if _git("status", "--porcelain", "--", source):
        named.insert(0, "no commit yet")
    return f" in {', '.join(named)}" if named else ""


def _git(*arguments: str) -> str | None:
    """The output of a git command on this project; None without git, without history, or if the command fails."""
    # Without .git here, git would use a repository around the project.
    return _output("git", "-C", str(ROOT), *arguments) if (ROOT / ".git").exists() else None


def _output(*command: str) -> str | None:
    """The output of a command; None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu(threads: int) -> str:
    """Such as "1 thread of 2 cores, AMD EPYC"."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found[1] if found else model
    return f"{threads} thread{'s' * (threads > 1)} of {os.cpu_count()} cores, {model}"


def _versions() -> dict[str, str]:
    installed = {each.name.lower() for each in importlib.metadata.distributions() if each.name}
    return {"python": sys.version.split()[0]} | {
        name: importlib.metadata.version(name) for name in LIBRARIES if name in installed
    }


def _write(table: Path, rows: list[dict]) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
