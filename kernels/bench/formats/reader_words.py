"""Measures the share of a file's words that its reader reads.

Each file has the words to be read beside it, in a file with the ending .txt: of a web page, for example, what a browser
shows (`document.body.innerText`, without menus). A word counts as often as it occurs.

    python kernels/bench/formats/reader_words.py FOLDER --ending .html
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from sebp_edge.texts.documents import Document, Unreadable
from sebp_edge.texts.formats import read_file

WORD = re.compile(r"\w+")


def words(text: str) -> Counter[str]:
    """Counts the words of a text, without case, which styles may change, and soft hyphens, which are not shown."""
    return Counter(WORD.findall(text.replace("\xad", "").casefold()))


def main() -> None:
    """Prints the shares of all files together, and the files that fall shortest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ending", default=".html")
    parser.add_argument("--worst", type=int, default=10, help="how many files to list, from the lowest share")
    args = parser.parse_args()
    shares, total, found, added, refused = [], 0, 0, 0, 0
    for path in sorted(args.folder.rglob(f"*{args.ending}")):
        expected = words(path.with_suffix(".txt").read_text(encoding="utf-8"))
        try:
            contents = [content for content in read_file(path) if not isinstance(content, Unreadable)]
        except Unreadable as reason:
            contents = []
            refused += 1
            print(f"{path.name}: {reason}")
        read = words("\n".join(Document("", content).own_text for content in contents))
        common = (read & expected).total()
        total, found, added = total + expected.total(), found + common, added + read.total() - common
        if expected:
            shares.append((common / expected.total(), path.name))
    shares.sort()
    for share, name in shares[: args.worst]:
        print(f"{share:.1%} {name}")
    print(f"{len(shares)} files with {total:,} words, {refused} refused")
    print(f"words read: {found / total:.2%} of all, in the median file {shares[len(shares) // 2][0]:.2%}")
    print(
        f"files with less than 99 % of their words: {sum(share < 0.99 for share, _ in shares)}, less than 90 %: "
        f"{sum(share < 0.9 for share, _ in shares)}"
    )
    print(f"words read that are not among them: {added / (found + added):.2%} of what was read")


if __name__ == "__main__":
    main()
