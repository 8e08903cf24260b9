"""The documents' tables of questions about notes."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import mean

from tables import NOT_RECORDED, if_recorded, index, markdown, recorded, rows

HEAD = ("right answers", "with the note in the prompt", "general loss", "own quiz")


def settings(result: str) -> str:
    """What each value of the recipe know gains and costs, as means over people and seeds."""
    if result not in index():
        return NOT_RECORDED
    of_setting = defaultdict(list)
    for row in rows(result):
        of_setting[row["setting"]].append(row)
    body = [
        [
            setting,
            f"{mean(row['notes'] for row in own):.0f}",
            f"{len(own)}",
            _arrow(own, "base_closed", "closed"),
            f"{mean(row['answer_loss'] for row in own):.2f}",
            _arrow(own, "base_with_note", "with_note"),
            f"{100 * mean(row['general_rise'] for row in own):+.1f} %",
            f"{100 * mean(row['own_right'] / row['own_questions'] for row in own):.0f} %",
        ]
        for setting, own in of_setting.items()
    ]
    columns = ("setting", "notes", "runs", HEAD[0], "answer loss", *HEAD[1:])
    return f"{markdown(columns, body)}\n\n{recorded(result)}"


def _arrow(own: list[dict], before: str, after: str) -> str:
    return f"{100 * mean(row[before] for row in own):.0f} → {100 * mean(row[after] for row in own):.0f} %"


def quality() -> str:
    """What is answered after an adaptation with the recipe know, by person, as means over seeds."""
    return _quality("quality", ("notes of", "notes"), lambda row: (row["person"], row["notes"]))


def arms() -> str:
    """What is answered after an adaptation with parts of the recipe know, as means over people and seeds."""
    return _quality("arms", ("arm", "notes"), lambda row: (row["arm"], row["notes"]))


def _quality(what: str, head: tuple[str, str], key: Callable[[dict], tuple[str, float]]) -> str:
    results = sorted(name for name in index() if name.startswith(f"know-{what}-"))
    if not results:
        return NOT_RECORDED
    found = defaultdict(list)
    for result in results:
        for row in rows(result):
            found[result, *key(row)].append(row)
    body = [
        [
            name,
            f"{notes:.0f}",
            f"{len(own)}",
            _arrow(own, "base_closed", "closed"),
            _spread(own),
            _arrow(own, "base_with_note", "with_note"),
            f"{100 * mean(row['general_rise'] for row in own):+.1f} %",
            _seconds(own),
            "CPU" if "-cpu" in result else "GPU",
        ]
        for (result, name, notes), own in found.items()
    ]
    columns = (*head, "runs", "right answers", "from, to", *HEAD[1:3], "adapt, s", "on a")
    return f"{markdown(columns, body)}\n\n{recorded(*results)}"


def _spread(own: list[dict]) -> str:
    """The worst and the best run."""
    shares = [100 * row["closed"] for row in own]
    return f"{min(shares):.0f}, {max(shares):.0f} %"


def _seconds(own: list[dict]) -> str:
    """The mean time of runs that had the device for themselves."""
    alone = [row["seconds"] for row in own if row["at_once"] == 1]
    return f"{mean(alone):.0f}" if alone else ""


def teachers() -> str:
    """What the loss on general text is with each kind of teacher on it."""
    body = [[row["teacher"], f"{100 * row['general_rise']:+.1f} %"] for row in rows("know-teachers")]
    return f"{markdown(('teacher on general text', 'general loss'), body)}\n\n{recorded('know-teachers')}"


def decoding() -> str:
    """Batched decoding beside one prompt at a time and beside padded batches."""
    results = sorted(name for name in index() if name.startswith("batched-decoding-"))
    if not results:
        return NOT_RECORDED
    body = [
        [
            row["method"],
            row["dtype"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['times_alone']:.1f}",
            f"{100 * row['equal']:.0f} %",
        ]
        for result in results
        for row in rows(result)
    ]
    head = ("prompts are decoded", "dtype", "tokens per second", "times as fast", "equal replies")
    return f"{markdown(head, body)}\n\n{recorded(*results)}"


def prefixes() -> str:
    """Steps with a system prompt that is computed once."""

    def table() -> str:
        body = [
            [row["computed"], f"{row['rows']:,}", f"{row['seconds']:.1f}", f"{row['times_faster']:.2f}"]
            for row in rows("shared-prefixes")
        ]
        head = ("the system prompt is computed", "rows", "s", "times as fast")
        return f"{markdown(head, body)}\n\n{recorded('shared-prefixes')}"

    return if_recorded("shared-prefixes", table)


TABLES: dict[str, Callable[[], str]] = {
    "know-settings": partial(settings, "know-settings"),
    "know-settings-seeds": partial(settings, "know-settings-seeds"),
    "know-teachers": teachers,
    "know-quality": quality,
    "know-arms": arms,
    "batched-decoding": decoding,
    "shared-prefixes": prefixes,
}
