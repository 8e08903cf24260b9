"""Records what owners and apps see, and lists what differs between two records that one machine made.

    python tests/proof/transcripts.py run CHECKOUT RECORD.json [--python PYTHON] [--only CHAPTER...]
    python tests/proof/transcripts.py compare BEFORE.json AFTER.json

The chapters: what commands print, their help, stores of earlier versions, conversations with `serve`, public names,
and the schema of messages. `placeholders.py` says what is left out. `same_bits.py` has the bits.
"""

import argparse
import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from hashlib import sha256
from pathlib import Path

# Characters that are shown of a value that differs.
SHOWN = 160
# A chapter that waits for longer waits for what never comes.
MAX_SECONDS = 900
# Each process draws the same salts, on which near-duplicates and splits depend.
SAME_SALTS = "import secrets\nsecrets.token_bytes = lambda count=None: bytes(count or 32)\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    run = modes.add_parser("run")
    run.add_argument("checkout", type=Path)
    run.add_argument("record", type=Path)
    run.add_argument("--python", default=sys.executable)
    run.add_argument("--only", nargs="*", default=[])
    compare = modes.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    child = modes.add_parser("_child")
    child.add_argument("work", type=Path)
    child.add_argument("checkout", type=Path)
    child.add_argument("only", nargs="*")
    given = parser.parse_args()
    if given.mode == "_child":
        return record_chapters(given.work, given.checkout, given.only)
    if given.mode == "compare":
        return compare_records(*(json.loads(path.read_text(encoding="utf-8")) for path in (given.before, given.after)))
    with tempfile.TemporaryDirectory(prefix="transcripts-") as temporary:
        return record_checkout(given.checkout.resolve(), Path(temporary).resolve(), given)


def record_checkout(checkout: Path, work: Path, given) -> int:
    """Records the chapters with the code of a checkout; writes them, and prints their hashes."""
    from same_bits import link_package

    link_package(checkout, work / "site")
    (work / "site" / "sitecustomize.py").write_text(SAME_SALTS)
    settings = {
        "PYTHONPATH": str(work / "site"),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
        "HOME": str(work / "home"),
        "HF_HOME": str(work / "cache" / "huggingface"),
    }
    command = [given.python, __file__, "_child", str(work), str(checkout), *given.only]
    code = subprocess.run(command, env=os.environ | settings, cwd=work, check=False).returncode
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("found/*.json"))}
    given.record.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, chapter in found.items():
        print(f"{name}: {len(chapter)} entries, {sha256(json.dumps(chapter).encode()).hexdigest()[:16]}")
    return code


def record_chapters(work: Path, checkout: Path, only: list[str]) -> int:
    """Forks a process for each chapter; returns 1 if one failed."""
    from commands import record_help, record_story
    from conversations import record_conversations
    from materials import save_models
    from public_names import record_names, record_schema

    import sebp_edge.cli.commands
    import sebp_edge.personalizer

    assert Path(sebp_edge.__file__).is_relative_to(work / "site"), f"{sebp_edge.__file__} is not of the checkout"
    chapters = {
        "commands": partial(record_story, "commands"),
        "earlier stores": partial(record_story, "earlier_stores"),
        "help": lambda *_: record_help(),
        "serve": record_conversations,
        "public names": lambda *_: record_names(checkout),
        "schema": lambda *_: record_schema(work / "site"),
    }
    (work / "found").mkdir()
    save_models(work / "models")
    failed = []
    for name in only or chapters:
        process = os.fork()
        if not process:
            os._exit(record_chapter(name, chapters[name], work))
        if os.waitpid(process, 0)[1]:
            failed.append(name)
            print(f"{name}: FAILED", flush=True)
    return bool(failed)


def record_chapter(name: str, record, work: Path) -> int:
    """Records one chapter in a folder of its own; returns 1 if that fails, or a command has no transcript."""
    from commands import EARLIER, commands_without_transcript
    from placeholders import Placeholders

    signal.alarm(MAX_SECONDS)
    folder = work / name.replace(" ", "-")
    folder.mkdir()
    os.chdir(folder)
    # A cache of its own, too: what one chapter has measured would be left out of the next one.
    os.environ |= {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
    try:
        found = record(folder, work, Placeholders({folder: "<folder>", work: "<work>", EARLIER: "<earlier stores>"}))
        missing = commands_without_transcript(found) if name == "commands" else []
    except BaseException:
        traceback.print_exc()
        return 1
    (work / "found" / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    print(*(f"No transcript: {one}" for one in missing), sep="\n", end="\n" * bool(missing), flush=True)
    return bool(missing)


def compare_records(before: dict, after: dict) -> int:
    """Prints a line for each difference; returns 1 if there is any."""
    lines = list(differences("", before, after))
    print(*lines, f"{len(lines)} differences.", sep="\n")
    return bool(lines)


def differences(place: str, old, new):
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


if __name__ == "__main__":
    sys.exit(main())
