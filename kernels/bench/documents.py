"""Writes the tables of the documents from the recorded results, and finds figures without a source.

    python kernels/bench/documents.py            writes the tables, and fails on a figure without a source
    python kernels/bench/documents.py --check    writes nothing, and fails on a table that differs from its results, too

A table of tables.toml stands between two comments, `<!-- table NAME -->` and `<!-- end -->`. A figure elsewhere is a
number with a unit or, in a table, with a decimal point; code does not count. sources.toml says where it comes from:
document, heading, source, and its figures below that heading.

    "from NAME..."      from these generated tables, which are searched for it
    "note COMMIT"       measured once, at that commit; no result is recorded
    "not measured"      set in the code, counted, cited, or an example

A section whose text names the commit of its figures ("at commit 1a2b3c4") needs no source, nor do the sections within
it: so do studies, whose tables are not generated. CHANGELOG.md is left out, since its figures belong to the changes
that it lists.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tables
from evidence import ROOT

DOCUMENTS = [
    document
    for folder in (".", "kernels", "kernels/bench", "kernels/bench/*", "recipes", "sebp_edge/**")
    for document in sorted(ROOT.glob(f"{folder}/*.md"))
    if document.name != "CHANGELOG.md"
]
SOURCES = ROOT / "kernels" / "bench" / "sources.toml"

TABLE = re.compile(r"^<!-- table ([\w-]+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"from ([\w -]+)|note [0-9a-f]{7,40}(?:: .+)?|not measured(?:: .+)?")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)", re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
COMMIT = re.compile(r"\bat commit\s[0-9a-f]{7,40}\b")

NUMBER = r"(?<![\w.])(?<![A-Za-z]-)(\d(?:[\d,]*\d)?(?:\.\d+)?)"
UNITS = r"%|ms|µs|s|seconds?|min|minutes?|hours?|[KMGT]i?B|bytes|nats|times|tokens/s|[GT]?FLOPs?"
WITH_UNIT = re.compile(rf"{NUMBER}(?:x|\s*(?:{UNITS}))(?!\w)")
DECIMAL = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d(?:[\d,]*\d)?\.\d+(?!\w|\.\d)")

Sources = Mapping[str, Mapping[str, list[str]]]


class Section(NamedTuple):
    """The text from a heading to the next one.

    Attributes:
        heading, line: its heading, and the line of that; no heading for what stands before the first one.
        text: without generated tables and code.
        stated: whether its text, or that of a section around it, names the commit of its figures.
    """

    heading: str
    line: int
    text: str
    stated: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sources = all_sources()
    found = [f"sources.toml: there is no {name}." for name in sources.keys() - set(map(_name, DOCUMENTS))]
    for document in DOCUMENTS:
        text, name = document.read_text(encoding="utf-8"), _name(document)
        if options.check:
            found += [f"{name}: {each}" for each in stale_tables(text)]
        else:
            document.write_text(filled(text), encoding="utf-8")
        found += [f"{name}{each}" for each in unsourced_figures(text, sources.get(name, {}))]
    if found:
        sys.exit("\n".join(found))


def all_sources() -> dict[str, Sources]:
    """The sources by document, heading and source."""
    return tomllib.loads(SOURCES.read_text(encoding="utf-8"))


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


def unsourced_figures(text: str, sources: Sources) -> Iterator[str]:
    """One sentence for each section with figures without a source, and for each source that does not hold."""
    all_sections = sections(text)
    for heading in sources.keys() - {section.heading for section in all_sections}:
        yield f": sources.toml: there is no heading {heading!r}."
    for section in all_sections:
        where, given = f":{section.line}: ", sources.get(section.heading, {})
        if "<!--" in CODE.sub("", section.text):
            yield f"{where}a comment that is no table's; sources belong into sources.toml."
        from_tables = any(source.startswith("from ") for source in given)
        figures = figures_of(section.text, decimals=from_tables)
        known = {figure for listed in given.values() for figure in listed}
        if missing := [] if section.stated else [figure for figure in figures if figure not in known]:
            yield f"{where}{', '.join(missing)}: say where this comes from (CONTRIBUTING.md, Add a figure)."
        if gone := known - set(figures):
            yield f"{where}{', '.join(sorted(gone))}: in sources.toml, and not below this heading."
        for source, listed in given.items():
            yield from (f"{where}{each}" for each in _wrong(source, listed))


def _wrong(source: str, figures: list[str]) -> Iterator[str]:
    match = SOURCE.fullmatch(source)
    if match is None:
        yield f"{source!r} is no source; kernels/bench/documents.py names the three kinds."
    elif match[1]:
        numbers = set(_numbers(" ".join(map(table, match[1].split()))))
        if wrong := [figure for figure in figures if not numbers.issuperset(_numbers(figure))]:
            yield f"{', '.join(wrong)}: not in {', '.join(match[1].split())}."


def figures_of(text: str, decimals: bool = False) -> list[str]:
    """The figures of a section: those with a unit; in its tables, or with `decimals`, decimal numbers, too."""
    text = CODE.sub("", text)
    found = {match.start(): match[0] for match in WITH_UNIT.finditer(text)}
    for line in re.finditer(r"^.*$" if decimals else r"^\|.*$", text, re.MULTILINE):
        for match in DECIMAL.finditer(text, line.start(), line.end()):
            found.setdefault(match.start(), match[0])
    return [*dict.fromkeys(" ".join(found[start].split()) for start in sorted(found))]


def _numbers(text: str) -> list[str]:
    return [each.replace(",", "") for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def sections(text: str) -> list[Section]:
    """The document's sections in order."""
    # What is left out leaves its lines, so that line numbers stay.
    for pattern in (TABLE, FENCED):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    starts = [(match.start(), len(match[1]), match[2].strip()) for match in HEADING.finditer(text)]
    if not starts or starts[0][0]:
        starts.insert(0, (0, 1, ""))
    ends = [*(start for start, _, _ in starts[1:]), len(text)]
    found: list[Section] = []
    stated_level = 0  # of the section whose text names a commit, if this one is within it
    for (start, level, heading), end in zip(starts, ends, strict=True):
        body = text[start:end]
        if not stated_level or level <= stated_level:
            stated_level = level if COMMIT.search(body) else 0
        found.append(Section(heading, text.count("\n", 0, start) + 1, body, bool(stated_level)))
    return found


def _name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    main()
