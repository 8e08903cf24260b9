"""Fetches the public notes of authors.toml, and says whether they are those that were measured.

    python kernels/bench/quality/fetch_authors.py FOLDER [NAME ...]

FOLDER/NAME then has one author's notes at their paths. The texts are their authors': measure, do not publish them. It
needs git and the network.
"""

import argparse
import hashlib
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

AUTHORS = Path(__file__).with_name("authors.toml")
# The most notes of an author.
MOST = 200
NOWHERE = r"\Z."


def main() -> None:
    authors = tomllib.loads(AUTHORS.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(authors)}")
    options = parser.parse_args()
    for name in options.names or authors:
        fetch(name, authors[name], options.folder / name)


def fetch(name: str, author: dict, target: Path) -> None:
    """Writes an author's notes and settings to a folder."""
    least, most = author["bytes"]
    texts: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as clone:
        git(clone, "init", "--quiet")
        git(clone, "remote", "add", "origin", author["repository"])
        git(clone, "config", "remote.origin.promisor", "true")
        # No history, and of the files only those that may be notes.
        git(clone, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", author["commit"])
        listed = git(clone, "ls-tree", "-r", "-z", "FETCH_HEAD").decode().split("\0")[:-1]
        blobs = {
            path: meta.split()[2] for meta, path in (each.split("\t") for each in listed) if meta.startswith("100")
        }
        unlike = re.compile(author.get("without_paths", NOWHERE))
        unsaid = re.compile(author.get("without_texts", NOWHERE), re.IGNORECASE)
        paths = [path for path in sorted(blobs) if re.fullmatch(author["paths"], path) and not unlike.search(path)]
        wanted = {blobs[path] for path in (*paths, *author.get("settings", ()))}
        git(clone, "fetch", "--quiet", "--no-write-fetch-head", "--stdin", "origin", given="\n".join(wanted))
        for path in paths:
            text = git(clone, "cat-file", "blob", blobs[path])
            if not least <= len(text) <= most or text in texts.values():
                continue
            if unsaid.search(text.decode(errors="replace")):
                continue
            texts[path] = text
            if len(texts) == MOST:
                break
        settings = {path: git(clone, "cat-file", "blob", blobs[path]) for path in author.get("settings", ())}
    for path, text in (texts | settings).items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(text)
    is_same = hashlib.sha256(b"".join(texts.values())).hexdigest() == author["sha256"]
    print(f"{name}: {len(texts)} notes, {'as' if is_same else 'NOT as'} measured ({author['licence']})")


def git(folder: str, *arguments: str, given: str = "") -> bytes:
    return subprocess.run(
        ["git", "-C", folder, *arguments], check=True, input=given.encode(), stdout=subprocess.PIPE
    ).stdout


if __name__ == "__main__":
    main()
