"""The last screen of `adapt`: the verdict, what it means and what to do next; never longer than a screen."""

from rich.text import Text

from sebp_edge.cli.console import out
from sebp_edge.cli.owner import name_owner, whose_words
from sebp_edge.run.result import AdaptResult
from sebp_edge.values.documents import printable

# Of a terminal; what does not fit is in the adapter's report.
LINES, COLUMNS = 15, 80


# The paragraphs in the order in which they stand.
HEADLINE, ACCOUNT, WARNING, EXPECTATION, COMMAND = range(5)


def show_result(result: AdaptResult, *, with_samples: bool = False) -> None:
    """Prints the verdict, why, warnings, what to expect and what to do next, in at most 15 lines of 80 columns."""
    # By importance: the first ones get their lines.
    paragraphs = [(HEADLINE, result.headline, f"bold {'green' if result.passed else 'yellow'}")]
    for what, command in result.next_steps.items():
        if with_samples and command == result.report_command:
            what, command = f"{what} and samples", f"{command} --with-samples"
        paragraphs.append((COMMAND, f"{what}: {command}", ""))
    paragraphs.append((ACCOUNT, result.account, ""))
    paragraphs += [(WARNING, f"warning: {warning}", "yellow") for warning in result.warnings]
    if result.passed or result.active:
        expected = (whose_words(result.authors), name_owner(result.expectation, result.authors))
        paragraphs.append((EXPECTATION, " ".join(filter(None, expected)), "dim"))
    shown, left = [], LINES
    for place, words, style in paragraphs:
        paragraph = Text(printable(words), style)
        lines = paragraph.wrap(out, COLUMNS)
        if len(lines) > left:
            if place == COMMAND or not left:  # nobody could run a part of a command
                continue
            lines = lines[:left]
            lines[-1].truncate(COLUMNS - 2)
            lines[-1].append(" …")
            paragraph = Text(" ").join(lines)
        left -= len(lines)
        shown.append((place, paragraph))
    for _, paragraph in sorted(shown, key=lambda each: each[0]):
        out.print(paragraph)
