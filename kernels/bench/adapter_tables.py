"""The documents' tables of saved adapters and their texts: learning on, forgetting, damaged input, large texts."""

from collections.abc import Callable
from functools import partial

from tables import NOT_RECORDED, Row, if_recorded, index, markdown, recorded, rows

LEARNING_ON_HEAD = ("notes", "seconds", "share of the time", "test loss, %", "loss on what is new", "verdict")


def learning_on() -> str:
    """Time and loss of learning on beside learning all again, for each number of notes, seed by seed."""
    table = markdown(LEARNING_ON_HEAD, _learning_on_cells(rows("learning-on")))
    return f"{table}\n\n{recorded('learning-on')}"


def learning_on_larger() -> str:
    """The same with larger models, each of which has a result of its own."""
    results = sorted(name for name in index() if name.startswith("learning-on-"))
    if not results:
        return NOT_RECORDED
    body = []
    for result in results:
        found = rows(result)
        body += [[found[0]["model"], *cells] for cells in _learning_on_cells(found)]
    return f"{markdown(('model', *LEARNING_ON_HEAD), body)}\n\n{recorded(*results)}"


def _learning_on_cells(found: list[Row]) -> list[list[str]]:
    """A line for each number of notes."""
    body = []
    for notes in sorted({row["notes"] for row in found}):
        on, again = (
            [row for row in found if (row["notes"], row["arm"]) == (notes, arm)] for arm in ("learning on", "all again")
        )
        pairs = list(zip(on, again, strict=True))
        body.append(
            [
                f"{notes:,.0f}",
                ", ".join(f"{first['seconds']:.1f} / {second['seconds']:.1f}" for first, second in pairs),
                ", ".join(f"1/{second['seconds'] / first['seconds']:.1f}" for first, second in pairs),
                ", ".join(f"{100 * (first['test_loss'] / second['test_loss'] - 1):+.2f}" for first, second in pairs),
                ", ".join(f"{first['loss_of_new']:.2f} / {second['loss_of_new']:.2f}" for first, second in pairs),
                ", ".join(row["verdict"] for row in on),
            ]
        )
    return body


def nothing_new() -> str:
    """Time of `adapt` if nothing is new, beside `--help`."""
    body = [
        [
            f"{row['notes']:,.0f}",
            f"{1000 * row['help_seconds']:.0f} ms",
            f"{1000 * row['seconds']:.0f} ms",
            f"{row['ratio']:.2f}",
        ]
        for row in rows("nothing-new")
    ]
    return f"{markdown(('notes', '`--help`', '`adapt`', 'ratio'), body)}\n\n{recorded('nothing-new')}"


def canaries() -> str:
    """Loss and exposure of planted sentences before and after they are forgotten."""
    body = [[row["adapter"], f"{row['loss']:.6f}", f"{row['exposure']:.2f}"] for row in rows("canaries")]
    return f"{markdown(('model', 'loss of the canaries', 'exposure, bits'), body)}\n\n{recorded('canaries')}"


def fuzz() -> str:
    """What became of damaged input."""
    found = rows("fuzz")
    body = [
        [
            row["kind"],
            f"{row['inputs']:,.0f}",
            f"{row['read']:,.0f}",
            f"{row['refused']:,.0f}",
            f"{row['slowest']:.1f} s",
        ]
        for row in found
    ]
    body.append(
        [
            "all",
            *(f"{sum(row[name] for row in found):,.0f}" for name in ("inputs", "read", "refused")),
            f"{max(row['slowest'] for row in found):.1f} s",
        ]
    )
    peak = max(row["peak"] for row in found)
    table = markdown(("input", "number", "read", "refused in one sentence", "slowest"), body)
    return f"{table}\n\nThe process took {peak / 1e9:.2f} GB more than before. {recorded('fuzz')}"


def large_text() -> str:
    """Time and memory of preparing one large text."""
    body = [
        [
            row["text"],
            f"{row['bytes'] / 1e6:.0f} MB",
            f"{row['seconds']:.0f} s",
            f"{row['peak'] / row['bytes']:.1f}x",
            f"{row['peak_with_plan'] / row['bytes']:.1f}x",
            f"{row['silence']:.1f} s",
            f"{row['stop']:.2f} s",
        ]
        for row in rows("large-text")
    ]
    head = ("text", "size", "time", "peak memory / size", "with the plan", "longest silence", "stops within")
    return f"{markdown(head, body)}\n\n{recorded('large-text')}"


TABLES: dict[str, Callable[[], str]] = {
    "canaries": partial(if_recorded, "canaries", canaries),
    "fuzz": partial(if_recorded, "fuzz", fuzz),
    "large-text": partial(if_recorded, "large-text", large_text),
    "learning-on": partial(if_recorded, "learning-on", learning_on),
    "learning-on-larger": learning_on_larger,
    "nothing-new": partial(if_recorded, "nothing-new", nothing_new),
}
