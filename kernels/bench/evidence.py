"""What a GPU measured, and whether the code has changed since.

    python kernels/bench/evidence.py        each result: fresh, or which of its sources changed after it, and in which
                                            commits; and which tests failed

Results are in gpu-results.json. Each carries a hash of every file or folder that it depends on, made where it was
measured, so that neither a copy without history nor an uncommitted change can make an old figure look new.
"""

import argparse
import csv
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "kernels" / "bench" / "gpu-results.json"
LIBRARIES = ("torch", "triton", "transformers", "peft", "liger_kernel", "unsloth")
OPS = ("kernels/ops",)
STEP = (*OPS, *(f"sebp_edge/{folder}" for folder in ("rows", "patches", "sparse", "memory", "training")))
TESTS = (*STEP, "sebp_edge/models", "sebp_edge/machine")
# So many commits of a change are named.
COMMITS = 5


def main() -> None:
    print(report(RESULTS))


def add_record_option(arguments: argparse.ArgumentParser) -> None:
    """--record [FILE]: where a benchmark's result is to be kept; without it, nowhere."""
    arguments.add_argument("--record", type=Path, nargs="?", const=RESULTS, metavar="FILE")


def record(name: str, sources: Iterable[str | Path], figures: dict | list[dict], file: Path = RESULTS) -> None:
    """Keeps one result under its name, in place of an earlier one; other results in `file` stay.

    Args:
        name: of the result, fit for a file's name.
        sources: files and folders of the project that the figures depend on; of a folder its Python files.
        figures: what was measured; rows of a table go into results/<name>.csv beside `file`, and the entry names it.
        file: JSON, made if it is not there.

    Raises:
        RuntimeError: there is no GPU.
        FileNotFoundError: a source is not there.
    """
    sources = sorted({_relative(source) for source in sources})
    entry = {
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **_commit(sources),
        **machine(),
        "sources": {source: hash_of(source) for source in sources},
    }
    if isinstance(figures, list):
        table = file.parent / "results" / f"{name}.csv"
        _write(table, figures)
        entry["table"] = table.relative_to(file.parent).as_posix()
    else:
        entry["figures"] = figures
    results = json.loads(file.read_text()) if file.exists() else {}
    _replace(file, json.dumps(results | {name: entry}, indent=1, sort_keys=True) + "\n")


def record_tests(outcomes: dict[str, list], file: Path) -> None:
    """Keeps how a session's GPU tests went, and all of its tests, and which failed; those of one file under its name.

    Args:
        outcomes: pytest's reports by outcome.
        file: see `record`.
    """
    reports = {name: outcomes.get(name, []) for name in ("passed", "failed", "error", "skipped")}
    # A file that is skipped as a whole has a report without keywords.
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


def machine() -> dict:
    """GPU, its driver, and the versions of the libraries that matter.

    Raises:
        RuntimeError: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA GPU here, and only what a GPU did is recorded; leave the recording out.")
    return {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "versions": _versions()}


def hash_of(source: str) -> str:
    """The first 16 hexadecimal digits of SHA-256 of a file, or of the paths and contents of a folder's Python files.

    Raises:
        FileNotFoundError: the source is not there.
    """
    path = ROOT / source
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    lines = (
        f"{file.relative_to(path).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n"
        for file in sorted(path.rglob("*.py"))
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def changes(entry: dict) -> list[str]:
    """What happened to the sources of an entry since it was recorded; one sentence each."""
    found = []
    for source, before in entry["sources"].items():
        if not (ROOT / source).exists():
            found.append(f"{source} is gone{_commits(source, entry['commit'])}")
        elif hash_of(source) != before:
            found.append(f"{source} changed{_commits(source, entry['commit'])}")
    return found


def report(file: Path) -> str:
    """One line for each result in `file`, one for each change that made it stale, and one for each test that failed."""
    if not file.exists():
        return f"No GPU results yet: {file.name} is not there."
    lines = []
    for name, entry in json.loads(file.read_text()).items():
        found = changes(entry)
        commit = (entry["commit"] or "no commit")[:7] + ("+" if entry["uncommitted"] else "")
        lines.append(f"{'stale' if found else 'fresh'}  {name:16} {entry['recorded'][:10]}  {commit:9}  {entry['gpu']}")
        failed = [f"{test} failed" for test in entry.get("figures", {}).get("wrong", [])]
        lines += [f"         {each}" for each in found + failed]
    return "\n".join(lines)


def _command() -> str:
    """The command that this process was started with, without the folders of the machine."""
    words = (word if not Path(word).is_absolute() else Path(word).name for word in sys.orig_argv[1:])
    return " ".join(["python", *words])


def _relative(path: str | Path) -> str:
    """A path in the project, from its top; one outside as it is."""
    path = (ROOT / path).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def _commit(sources: list[str]) -> dict:
    """The commit that was measured, and whether a source differs from it; None for what is not known.

    A copy without its history can be told its commit by SEBP_EDGE_COMMIT; the hashes say whether it is true.
    """
    commit, told = _git("rev-parse", "HEAD"), os.environ.get("SEBP_EDGE_COMMIT")
    if commit is None or told is not None:
        return {"commit": told, "uncommitted": None}
    return {"commit": commit, "uncommitted": bool(_git("status", "--porcelain", "--", *sources))}


def _commits(source: str, since: str | None) -> str:
    """Where a source changed after a commit: " in <commits>", or "" where there is no history that tells."""
    told = _git("log", "--format=%h", "--abbrev=7", f"{since}..", "--", source)
    if told is None:
        return ""
    commits = told.split()
    named = commits[:COMMITS] + ([f"{len(commits) - COMMITS} more"] if len(commits) > COMMITS else [])
    if _git("status", "--porcelain", "--", source):
        named.insert(0, "no commit yet")
    return f" in {', '.join(named)}" if named else ""


def _git(*arguments: str) -> str | None:
    """What git says about this project; None without git, or in a copy without its history."""
    # Without .git here, git would answer for a repository around the project.
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


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


def _replace(file: Path, text: str) -> None:
    """All of the new text or all of the old, whatever happens."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(file)


if __name__ == "__main__":
    main()
