"""The documents' tables of questions about notes."""

from collections.abc import Callable

from tables import markdown, recorded, rows

HEAD = ("right answers", "with the note in the prompt", "general loss", "own quiz", "adapt, s")


def settings() -> str:
    """What each value of the recipe know gains and costs."""
    body = [
        [
            row["setting"],
            f"{row['notes']:.0f}",
            f"{100 * row['base_closed']:.0f} → {100 * row['closed']:.0f} %",
            f"{100 * row['base_with_note']:.0f} → {100 * row['with_note']:.0f} %",
            f"{100 * row['general_rise']:+.1f} %",
            f"{100 * row['own_right'] / row['own_questions']:.0f} %",
            f"{row['seconds']:.0f}",
        ]
        for row in rows("know-settings")
    ]
    return f"{markdown(('setting', 'notes', *HEAD), body)}\n\n{recorded('know-settings')}"


def teachers() -> str:
    """What the loss on general text is with each kind of teacher on it."""
    body = [[row["teacher"], f"{100 * row['general_rise']:+.1f} %"] for row in rows("know-teachers")]
    return f"{markdown(('teacher on general text', 'general loss'), body)}\n\n{recorded('know-teachers')}"


TABLES: dict[str, Callable[[], str]] = {"know-settings": settings, "know-teachers": teachers}
