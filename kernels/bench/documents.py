"""Writes the tables of the documents from the recorded results, and finds figures without a source.

    python kernels/bench/documents.py            writes the tables, and fails on a figure without a source
    python kernels/bench/documents.py --check    writes nothing, and fails on a table that differs from its results, too

A table of tables.toml stands between two comments, `<!-- table NAME -->` and `<!-- end -->`. A figure elsewhere is a
number with a unit or, in a table, with a decimal point; code does not count. A comment in its paragraph, list item or
table says where it comes from:

    <!-- from NAME... -->      from these generated tables, which are searched for it; figures from elsewhere follow
                               behind a semicolon
    <!-- note COMMIT -->       measured once, at that commit; no result is recorded
    <!-- not measured -->      set in the code, counted, cited, or an example

On a line above a list a comment counts for the whole list, and alone between two blank lines for the rest of its
section. A section whose text names the commit of its figures ("at commit 1a2b3c4") needs no comments, nor do the
sections within it: so do studies, whose tables are not generated. CHANGELOG.md is left out, since its figures belong to
the changes that it lists.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tables
from evidence import ROOT

DOCUMENTS = [
    document
    for folder in (".", "kernels", "kernels/bench", "kernels/bench/*", "recipes", "sebp_edge", "sebp_edge/models/tiny")
    for document in sorted(ROOT.glob(f"{folder}/*.md"))
    if document.name != "CHANGELOG.md"
]

TABLE = re.compile(r"^<!-- table ([\w-]+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!-- (.*?) -->", re.DOTALL)
SOURCE = re.compile(r"(from) ([\w -]+)(?:;.*)?|note [0-9a-f]{7,40}(?::.*)?|not measured(?::.*)?", re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#+) ")
COMMIT = re.compile(r"\bat commit\s[0-9a-f]{7,40}\b")
LIST_ITEM = re.compile(r"^(?=\s*(?:[-*]|\d+\.) )", re.MULTILINE)

NUMBER = r"(?<![\w.])(?<![A-Za-z]-)(\d[\d,]*(?:\.\d+)?)"
UNITS = r"%|ms|µs|s|seconds?|min|minutes?|hours?|[KMGT]i?B|bytes|nats|times|tokens/s|[GT]?FLOPs?"
WITH_UNIT = re.compile(rf"{NUMBER}(?:x|\s?(?:{UNITS}))(?!\w)")
DECIMAL = re.compile(r"(?<![\w.])(?<![A-Za-z]-)(\d[\d,]*\.\d+)(?!\w|\.\d)")


class Block(NamedTuple):
    """A paragraph, a list item or a table.

    Attributes:
        text, line: the block, and the line that it begins on.
        comments: those that count for it.
        stated: whether the text of its section names the commit of its figures.
    """

    text: str
    line: int
    comments: list[str]
    stated: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        if options.check:
            found += [f"{_name(document)}: {each}" for each in stale_tables(text)]
        else:
            document.write_text(filled(text), encoding="utf-8")
        found += [f"{_name(document)}{each}" for each in unsourced_figures(text)]
    if found:
        sys.exit("\n".join(found))


def filled(text: str) -> str:
    """The document with its tables written anew."""
    return TABLE.sub(lambda match: f"<!-- table {match[1]} -->\n{table(match[1])}\n<!-- end -->", text)


@cache
def table(name: str) -> str:
    if name not in tables.names():
        sys.exit(f"No table is called {name!r}; there are {', '.join(tables.names())}.")
    return tables.table(name)


def stale_tables(text: str) -> Iterator[str]:
    """One sentence for each table that differs from its results."""
    for match in TABLE.finditer(text):
        if match[0] != filled(match[0]):
            yield f"table {match[1]} is not what the results say; run python kernels/bench/documents.py."
    if len(re.findall(r"^<!-- table ", text, re.MULTILINE)) != len(TABLE.findall(text)):
        yield "a table has no end; put <!-- end --> on a line of its own behind it."


def unsourced_figures(text: str) -> Iterator[str]:
    """One sentence for each block with figures that no comment gives a source, or the wrong one."""
    for block in blocks(text):
        figures = figures_of(block)
        sources = [source for comment in block.comments if (source := SOURCE.fullmatch(comment))]
        if figures and not sources and not block.stated:
            found = ", ".join(figures.values())
            yield f":{block.line}: {found}: say where this comes from (CONTRIBUTING.md, Add a figure)."
        for source in sources:
            if source[1]:
                known = set(_numbers(" ".join([source[0], *map(table, source[2].split())])))
                wrong = [figure for number, figure in figures.items() if number not in known]
                if wrong:
                    yield f":{block.line}: {', '.join(wrong)}: not in {', '.join(source[2].split())}."


def figures_of(block: Block) -> dict[str, str]:
    """The figures by their numbers: those with a unit, and those with a decimal point in a table or from one."""
    text = CODE.sub("", COMMENT.sub("", block.text))
    patterns = [WITH_UNIT]
    if text.lstrip().startswith("|") or any(comment.startswith("from ") for comment in block.comments):
        patterns.append(DECIMAL)
    return {match[1].replace(",", ""): match[0] for pattern in reversed(patterns) for match in pattern.finditer(text)}


def _numbers(text: str) -> list[str]:
    return [each.replace(",", "") for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def blocks(text: str) -> Iterator[Block]:
    """The document's blocks outside of generated tables and code, in order."""
    # What is left out leaves its lines, so that line numbers stay.
    for pattern in (TABLE, re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    of_section: list[str] = []
    line, stated = 1, _stated_lines(text)
    for chunk in re.split(r"(\n\s*\n)", text):
        comments = COMMENT.findall(chunk)
        if chunk.startswith("#"):
            of_section = []
        if comments and not COMMENT.sub("", chunk).strip():
            of_section = comments
        elif chunk.strip():
            above = COMMENT.findall(chunk.split("\n")[0]) if chunk.startswith("<!--") else []
            for item in LIST_ITEM.split(chunk):
                yield Block(item, line, [*of_section, *above, *COMMENT.findall(item)], line in stated)
                line += item.count("\n")
            continue
        line += chunk.count("\n")


def _stated_lines(text: str) -> set[int]:
    """The lines of sections whose own text, or that of a section around them, names a commit."""
    lines = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text).split("\n")
    starts = {number: len(match[1]) for number, line in enumerate(lines, 1) if (match := HEADING.match(line))}
    ends = [*starts, len(lines) + 1]
    found: set[int] = set()
    for start, level in starts.items():
        if COMMIT.search("\n".join(lines[start - 1 : next(end for end in ends if end > start) - 1])):
            found.update(range(start, next((n for n in starts if n > start and starts[n] <= level), len(lines) + 1)))
    return found


def _name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    main()
