"""The last screen of `adapt`: the verdict, what it means and what to do next; never longer than a screen."""

from rich.text import Text

from sebp_edge.cli.console import out
from sebp_edge.run.result import AdaptResult
from sebp_edge.texts.documents import printable

# Of a terminal; what does not fit is in the adapter's report.
LINES, COLUMNS = 15, 80
# Of the reasons for the verdict, so that warnings have room.
REASON_LINES = 5


def show_result(result: AdaptResult, *, with_samples: bool = False) -> None:
    """Prints the verdict, why, warnings, what to expect and what to do next, in at most 15 lines of 80 columns.

    Args:
        with_samples: whether samples were kept for the report.
    """
    screen, style = _Screen(), "green" if result.kept else "yellow"
    screen.add(0, result.headline, f"bold {style}")
    for what, command in result.next_steps.items():
        if with_samples and command == result.report_command:
            what, command = f"{what} and samples", f"{command} --with-samples"
        screen.add(4, f"{what}: {command}", is_command=True)
    screen.add(1, result.account, limit=REASON_LINES)
    for warning in result.warnings:
        screen.add(2, f"warning: {warning}", "yellow")
    if result.kept or result.active:
        screen.add(3, result.expectation, "dim")
    screen.show()


class _Screen:
    """Paragraphs that are added in the order of their importance, and shown in that of their places."""

    def __init__(self):
        self._paragraphs: list[tuple[int, Text]] = []
        self._left = LINES

    def add(self, place: int, words: str, style: str = "", *, limit: int = LINES, is_command: bool = False) -> None:
        """Adds a paragraph as far as lines are left; leaves out a command that does not fit, which nobody could run.

        Args:
            place: shown paragraphs are sorted by it.
            limit: the most lines for this paragraph.
        """
        paragraph, limit = Text(printable(words), style), min(limit, self._left)
        lines = paragraph.wrap(out, COLUMNS)
        if len(lines) > limit:
            if is_command or not limit:
                return
            lines = lines[:limit]
            lines[-1].truncate(COLUMNS - 2)
            lines[-1].append(" …")
            paragraph = Text(" ").join(lines)
        self._left -= len(lines)
        self._paragraphs.append((place, paragraph))

    def show(self) -> None:
        for _, paragraph in sorted(self._paragraphs, key=lambda each: each[0]):
            out.print(paragraph)
