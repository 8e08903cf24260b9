"""Writes the documents' tables from recorded results, as tables.toml specifies them.

A table of tables.toml has these keys:

    results      the recorded results, or patterns such as "know-quality-*"; by default the one with the table's name
    where        an expression: whether a row is used
    sort         an expression by which rows are sorted; rows that are equal keep their order
    line         a template: rows for which it is the same share a line of the table; by default each row has its own
    columns      a list of [head, cell] or [head, cell, joiner], templates. A head with a template in it
                 makes as many columns as it has values. With a joiner, the cell is written for each row of the line and
                 joined by it; else it is written once, for the first.
    more         further lines: a list of {head, cell, where}, which have a cell for each column that a head made, from
                 the row that `where` chooses; or of {cells}, a list of templates
    after        a template of text behind the table
    libraries    whose versions are named; by default torch
    recorded     false if nothing is said about where the results come from
    like         another table, whose keys count where this one has none

Expressions are Python, and templates are the inside of an f-string. Both know the columns of the row, `row` itself,
`rows` (all that are used), `group` (those of the line), `words` (of the file), `spec`, and the functions below that are
named in FUNCTIONS. A column hides what has the same name.
"""

import csv
import fnmatch
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from statistics import mean, median

import evidence

SPECIFICATIONS = Path(__file__).with_name("tables.toml")
LIBRARIES = ("torch",)  # results.json has the versions of the others
NOT_RECORDED = "Not recorded yet."


class Row(dict):
    """A row of a result: a cell is a number if it can be, and None if it is empty."""

    __getattr__ = dict.__getitem__


def ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def between(values: Iterable[float], form: str = ".1f") -> str:
    """The smallest and the largest value, such as "1.7 to 2.0"."""
    values = list(values)
    low, high = (format(end, form) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def find(rows: list[Row], **cells) -> Row | None:
    """The first row with these cells."""
    return next((row for row in rows if all(row[name] == value for name, value in cells.items())), None)


def told(rows: list[Row], least: float) -> str:
    """The shares of questions that are told a right reply, and a wrong one, if replies as likely as this are told."""
    replies = [row for row in rows if row.found == "True" and row.stands == "True" and row.probability >= least]
    right = sum(row.right == "True" for row in replies)
    return " / ".join(f"{100 * number / len(rows):.0f}" for number in (right, len(replies) - right))


FUNCTIONS = {
    "told": told,
    "ms": ms,
    "between": between,
    "mean": mean,
    "median": median,
    "loads": json.loads,
    "split": re.split,
}


@cache
def specifications() -> dict:
    return tomllib.loads(SPECIFICATIONS.read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of all tables."""
    return list(specifications()["tables"])


def table(name: str) -> str:
    """The table in Markdown, and where its results were recorded.

    Raises:
        KeyError: there is no such table.
    """
    spec = _specification(name)
    entries = json.loads(evidence.RESULTS.read_text(encoding="utf-8"))
    patterns = spec.get("results", [name])
    results = sorted(result for result in entries if any(fnmatch.fnmatch(result, pattern) for pattern in patterns))
    if not results:
        return NOT_RECORDED
    every = [row for result in results for row in _read(result, entries[result])]
    parts = [_markdown(spec, every)] if "columns" in spec else []
    after = evaluate(spec.get("after", ""), spec, every, _used(spec, every))
    if spec.get("recorded", True):
        after += recorded([entries[result] for result in results], spec.get("libraries", LIBRARIES))
    return "\n\n".join([*parts, after] if after else parts)


def recorded(entries: list[dict], libraries: Iterable[str] = LIBRARIES) -> str:
    """One sentence on where results come from: machine, commit, versions and files."""
    said: dict[str, list[str]] = {}
    for entry in entries:
        commit = entry["commit"][:7] + (" with uncommitted changes" if entry["uncommitted"] else "")
        versions = (
            f"{each.replace('_', '-')} {entry['versions'][each]}" for each in libraries if each in entry["versions"]
        )
        machine = f"an {entry['gpu']}" if entry["gpu"] else entry["cpu"]
        origin = f"Recorded on {machine} at commit {commit} ({', '.join(versions)})"
        said.setdefault(origin, []).append(f"`{entry['table']}`")
    return "\n".join(f"{origin}: {', '.join(tables)}." for origin, tables in said.items())


def _specification(name: str) -> dict:
    spec = specifications()["tables"][name]
    return _specification(spec["like"]) | {"results": [name]} | spec if "like" in spec else spec


def _read(result: str, entry: dict) -> list[Row]:
    with (evidence.RESULTS.parent / entry["table"]).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return [Row({key: _value(cell) for key, cell in row.items()}, result=result) for row in rows]


def _value(cell: str) -> str | int | float | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell or None


def evaluate(text: str, spec: dict, every: list[Row], rows: list[Row], group: list[Row] = (), row: Row | None = None):
    """Fills a template of tables.toml."""
    return _expression(f'f"""{text}"""', spec, every, rows, group, row)


def _expression(
    code: str, spec: dict, every: list[Row], rows: list[Row], group: list[Row] = (), row: Row | None = None
):
    known = {"rows": rows, "group": group, "row": row, "spec": spec, "words": specifications()["words"]}
    # The specifications are part of this project, as its code is.
    return eval(code, FUNCTIONS | {"find": partial(find, every)} | known | (row or {}))


def _used(spec: dict, every: list[Row]) -> list[Row]:
    found = [row for row in every if "where" not in spec or _expression(spec["where"], spec, every, every, row=row)]
    order = spec.get("sort", "0")  # sorting is stable
    return sorted(found, key=lambda row: _expression(order, spec, every, found, row=row))


def _markdown(spec: dict, every: list[Row]) -> str:
    rows = _used(spec, every)
    fill = partial(evaluate, spec=spec, every=every, rows=rows)
    lines: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        lines.setdefault(fill(spec["line"], row=row) if "line" in spec else number, []).append(row)
    columns = [column for each in spec["columns"] for column in _columns(each, rows, fill)]
    body = [[cell(group) for _, _, cell in columns] for group in lines.values()]
    for line in spec.get("more", ()):
        if "cells" in line:
            body.append([fill(cell) for cell in line["cells"]])
            continue
        group = [row for row in rows if _expression(line["where"], spec, every, rows, row=row)]
        chosen = [next((row for row in group if fill(head, row=row) == title), None) for title, head, _ in columns[1:]]
        body.append([line["head"], *(fill(line["cell"], row=row) if row else "" for row in chosen)])
    titles, *others = (
        "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in ([c[0] for c in columns], *body)
    )
    return "\n".join([titles, "|---" * len(columns) + "|", *others])


def _columns(column: list[str], rows: list[Row], fill: Callable) -> list[tuple[str, str, Callable[[list[Row]], str]]]:
    """The title, the head and the function from a line's rows to a cell, of each column that a column stands for."""
    head, cell, *joiner = column

    def write(found: list[Row]) -> str:
        if joiner:
            return joiner[0].join(fill(cell, group=found, row=row) for row in found)
        return fill(cell, group=found, row=found[0]) if found else ""

    if "{" not in head:
        return [(head, head, write)]
    titles = dict.fromkeys(fill(head, row=row) for row in rows)

    def write_of(title: str, group: list[Row]) -> str:
        return write([row for row in group if fill(head, row=row) == title])

    return [(title, head, partial(write_of, title)) for title in titles]
