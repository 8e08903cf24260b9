"""Runs the parts of a proof with the code of a checkout, each in a process that is forked, and compares two records."""

import argparse
import difflib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

# Characters that are shown of a value that differs.
SHOWN = 160
# A part that waits for longer waits for what never comes.
MAX_SECONDS = 900
# Each process draws the same salts, on which near-duplicates and splits depend.
SAME_SALTS = "import secrets\nsecrets.token_bytes = lambda count=None: bytes(count or 32)\n"
SETTINGS = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",
}
# By name, what records a part in a folder of its own, given the folder of all; returns what is written as JSON.
Parts = dict[str, Callable[[Path, Path], dict]]


def main(script: str, description: str, make_parts: Callable[[Path, Path], Parts]) -> int:
    """Runs or compares, as the command line of a proof says.

    Args:
        make_parts: is given the folder of all and the checkout, in a process that has the checkout's code.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    run = modes.add_parser("run")
    run.add_argument("checkout", type=Path)
    run.add_argument("record", type=Path)
    run.add_argument("--python", default=sys.executable)
    run.add_argument("--only", nargs="*", default=[])
    run.add_argument("--keep", type=Path)
    compare = modes.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    child = modes.add_parser("_child")
    child.add_argument("work", type=Path)
    child.add_argument("checkout", type=Path)
    child.add_argument("only", nargs="*")
    given = parser.parse_args()
    if given.mode == "_child":
        return record_parts(given.work, given.only, make_parts(given.work, given.checkout))
    if given.mode == "compare":
        lines = [*differences("", *(json.loads(path.read_text("utf-8")) for path in (given.before, given.after)))]
        print(*lines, f"{len(lines)} differences.", sep="\n")
        return bool(lines)
    with tempfile.TemporaryDirectory(prefix="proof-") as temporary:
        work = given.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=not given.keep)
        return run_checkout(script, given.checkout.resolve(), work.resolve(), given)


def run_checkout(script: str, checkout: Path, work: Path, given) -> int:
    """Records the parts with the code of a checkout."""
    link_package(checkout, work / "site")
    (work / "site" / "sitecustomize.py").write_text(SAME_SALTS)
    homes = {"HOME": str(work / "home"), "HF_HOME": str(work / "cache" / "huggingface")}
    path = [work / "site", Path(__file__).parents[1] / "helpers"]
    settings = SETTINGS | homes | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [given.python, script, "_child", str(work), str(checkout), *given.only]
    code = subprocess.run(command, env=os.environ | settings, cwd=work, check=False).returncode
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("found/*.json"))}
    given.record.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return code


def link_package(checkout: Path, site: Path) -> None:
    """Lays the package out as it is installed: with its ops and recipes, which lie elsewhere in a checkout."""
    package = site / "sebp_edge"
    package.mkdir(parents=True)
    for path in (checkout / "sebp_edge").iterdir():
        (package / path.name).symlink_to(path)
    (package / "ops").symlink_to(checkout / "kernels" / "ops")
    (package / "recipes").symlink_to(checkout / "recipes")


def record_parts(work: Path, only: list[str], parts: Parts) -> int:
    """Forks a process for each part; returns 1 if one failed."""
    from materials import save_models

    import sebp_edge
    import sebp_edge.ops

    for module in (sebp_edge, sebp_edge.ops):
        assert Path(module.__file__).is_relative_to(work / "site"), f"{module.__file__} is not of the checkout"
    (work / "found").mkdir()
    save_models(work / "models")
    gc.freeze()
    failed = []
    for name in only or parts:
        begin, process = time.perf_counter(), os.fork()
        if not process:
            os._exit(record_part(name, parts[name], work))
        if os.waitpid(process, 0)[1]:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.1f} s{', FAILED' * (name in failed)}", flush=True)
    return bool(failed)


def record_part(name: str, record: Callable[[Path, Path], dict], work: Path) -> int:
    """Records one part in a folder of its own; returns 1 if that fails."""
    signal.alarm(MAX_SECONDS)
    folder = work / name.replace(" ", "-")
    folder.mkdir()
    os.chdir(folder)
    # A cache of its own, too: what one part has measured would be left out of the next one.
    os.environ |= {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(work / "cache" / folder.name)}
    try:
        found = record(folder, work)
    except BaseException:
        traceback.print_exc()
        return 1
    (work / "found" / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def differences(place: str, old, new) -> Iterator[str]:
    """Yields a line for each value that came, went or changed, with its place."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            where = f"{place} | {key}" if place else key
            if key not in new or key not in old:
                yield f"{where}: {'gone' if key in old else 'new'}"
            else:
                yield from differences(where, old[key], new[key])
        if [*old] != [*new] and old.keys() == new.keys():
            yield f"{place}: in another order"
    elif isinstance(old, list) and isinstance(new, list) and old != new:
        texts = [[json.dumps(one, ensure_ascii=False) for one in each] for each in (old, new)]
        for how, begin, end, first, last in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
            if how == "replace" and end - begin == last - first:
                for number, (one, other) in enumerate(zip(old[begin:end], new[first:last], strict=True), begin):
                    yield from differences(f"{place} | {number}", one, other)
            elif how != "equal":
                yield from (f"{place} | {begin}: gone: {one[:SHOWN]}" for one in texts[0][begin:end])
                yield from (f"{place} | {begin}: new: {one[:SHOWN]}" for one in texts[1][first:last])
    elif old != new:
        yield f"{place}: {json.dumps(old)[:SHOWN]} -> {json.dumps(new)[:SHOWN]}"
