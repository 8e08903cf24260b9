"""Hashes what 28 configurations compute, and compares the hashes of two checkouts.

    python tests/proof/same_bits.py run CHECKOUT HASHES.json [--python PYTHON] [--only NAME...] [--keep FOLDER]
    python tests/proof/same_bits.py compare BEFORE.json AFTER.json

`run` imports the project from CHECKOUT, whatever PYTHON has installed; each configuration runs in a process that is
forked then. `--keep` leaves what was written, and a list of what was hashed, in a new folder, for `diff`.
"""

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from recorder import NOT_COMPARED, Recorder

# How many differences of a kind are shown.
SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    run = modes.add_parser("run")
    run.add_argument("checkout", type=Path)
    run.add_argument("hashes", type=Path)
    run.add_argument("--python", default=sys.executable)
    run.add_argument("--only", nargs="*", default=[])
    run.add_argument("--keep", type=Path)
    compare = modes.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    child = modes.add_parser("_child")
    child.add_argument("work", type=Path)
    child.add_argument("only", nargs="*")
    given = parser.parse_args()
    if given.mode == "_child":
        return run_configurations(given.work.resolve(), given.only)
    if given.mode == "compare":
        return compare_hashes(*(json.loads(path.read_text(encoding="utf-8")) for path in (given.before, given.after)))
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        work = Path(temporary)
        if given.keep:
            given.keep.mkdir(parents=True)
            work = given.keep.resolve()
        return run_checkout(given.checkout.resolve(), work, given.hashes, given.python, given.only)


def run_checkout(checkout: Path, work: Path, hashes: Path, python: str, only: list[str]) -> int:
    """Runs the configurations with the code of a checkout; writes their hashes."""
    link_package(checkout, work / "site")
    settings = {
        "PYTHONPATH": str(work / "site"),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
    }
    command = [python, __file__, "_child", str(work), *only]
    code = subprocess.run(command, env=os.environ | settings, cwd=work, check=False).returncode
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((work / "found").glob("*.json"))
    }
    hashes.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return code


def link_package(checkout: Path, site: Path) -> None:
    """Lays the package out as it is installed: with its ops and recipes, which lie elsewhere in a checkout."""
    package = site / "sebp_edge"
    package.mkdir(parents=True)
    for path in (checkout / "sebp_edge").iterdir():
        (package / path.name).symlink_to(path)
    (package / "ops").symlink_to(checkout / "kernels" / "ops")
    (package / "recipes").symlink_to(checkout / "recipes")


def run_configurations(work: Path, only: list[str]) -> int:
    """Forks a process for each configuration; returns 1 if one failed."""
    gc.disable()
    for name in ("sebp_edge.ops", "sebp_edge.research", "sebp_edge.cli", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    import torch

    import sebp_edge

    _ = sebp_edge.Personalizer
    from configurations import CONFIGURATIONS
    from materials import save_models

    for module in (sebp_edge, sebp_edge.ops):
        assert Path(module.__file__).is_relative_to(work / "site"), f"{module.__file__} is not of the checkout"
    torch.set_num_threads(1)
    (work / "found").mkdir()
    save_models(work / "models")
    gc.freeze()
    gc.enable()
    failed = []
    for name in only or CONFIGURATIONS:
        begin = time.perf_counter()
        process = os.fork()
        if not process:
            os._exit(run_one(CONFIGURATIONS[name], work, name))
        if os.waitpid(process, 0)[1]:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.1f} s{', FAILED' * (name in failed)}", flush=True)
    return bool(failed)


def run_one(run, work: Path, name: str) -> int:
    """Runs one configuration in its own folder; writes the hashes of what it found."""
    folder = work / name
    folder.mkdir()
    os.chdir(folder)
    os.environ |= {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(work / "cache")}
    # Each checkout draws the same salts. Near-duplicates and splits depend on them.
    import secrets

    secrets.token_bytes = lambda count=None: bytes(count or 32)
    recorder = Recorder(folder, work)
    try:
        run(recorder)
        recorder.documents()
        recorder.files()
    except BaseException:
        traceback.print_exc()
        return 1
    (work / "found" / f"{name}.json").write_text(json.dumps(recorder.found), encoding="utf-8")
    return 0


def compare_hashes(before: dict, after: dict) -> int:
    """Prints what differs, by configuration and kind; returns 1 if anything does."""
    different = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, {}), after.get(name, {})
        lines = [line for kind in sorted(old.keys() | new.keys()) for line in differences(kind, old, new)]
        different += bool(lines)
        print(f"{name}: {'DIFFERS' if lines else 'same'}", *lines, sep="\n")
    print(f"{len(before.keys() | after.keys()) - different} configurations are the same, {different} differ.")
    for file, reason in NOT_COMPARED.items():
        print(f"Not compared: {file}: {reason}.")
    return bool(different)


def differences(kind: str, old: dict, new: dict) -> list[str]:
    """Returns a line for each of the first things of a kind that came, went or changed."""
    old, new = old.get(kind, {}), new.get(kind, {})
    keys = [key for key in old | new if old.get(key) != new.get(key)]
    how = [("new" if key not in old else "gone" if key not in new else "changed") for key in keys]
    lines = [f"  {kind}: {key} ({word})" for key, word in zip(keys, how, strict=True)]
    return lines[:SHOWN] + [f"  {kind}: and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)


if __name__ == "__main__":
    sys.exit(main())
