"""`sebp-edge inspect PATH...`: shows what an adaptation to these texts would do, and changes nothing."""

import re
from typing import Annotated

from rich.markup import escape

from sebp_edge.basics.units import percent, plural
from sebp_edge.cli.base_model import prepared
from sebp_edge.cli.console import hanging, out, print_json, print_table
from sebp_edge.cli.options import FreeMemory, Request, Threads, name_option, takes_request
from sebp_edge.cli.owner import describe_author, name_owner
from sebp_edge.machine.politeness import Politeness
from sebp_edge.values.documents import printable

# Lines of a list, and characters of a rendered run; JSON has all.
MAX_LINES, MAX_RUN = 8, 400
# A smaller share of boilerplate is not worth a line.
MIN_BOILERPLATE = 0.01
# What models begin and end texts with. JSON has them.
_MARKS = re.compile(r"^\s*(?:<\|[\w-]+\|>|<(?:s|bos)>)\s*$|(?:<\|[\w-]+\|>|</s>|<eos>)$")


@takes_request()
def inspect(
    request: Request,
    name: Annotated[str | None, name_option("Name of the adapter, whose documents keep their splits.")] = None,
    memory: FreeMemory = None,
    threads: Threads = None,
) -> None:
    """Show what `adapt` would do with the texts in PATH: what is read, the split, examples, memory and time.

    Loads no weights and changes nothing. `plan` shows the memory by purpose.
    """
    # Threads decide the speed.
    politeness = None if threads is None else Politeness.of(threads=threads)
    found = prepared("inspect", request, name, memory_budget=memory, politeness=politeness)
    if request.as_json:
        print_json(found.to_dict())
    else:
        show_inspection(found)


def show_inspection(found) -> None:
    """Prints an inspection."""
    tokenizer = "" if found.own_tokenizer else ", counted with the bundled model's tokenizer"
    out.print(
        f"{plural(found.documents, 'document')}, {plural(found.characters, 'character')}: "
        f"{plural(found.examples, 'example')}, {plural(found.tokens, 'token')}{tokenizer}"
    )
    if found.exports:
        out.print(
            escape(
                f"{' and '.join(found.exports)}: {plural(found.own_words, 'word')} of yours are trained on, "
                f"{plural(found.others_words, 'word')} of others are context"
            )
        )
        _show_list("people", [describe_author(author) for author in found.authors])
    for group in found.left_out:
        if group.counts:
            counts = [f"{source}: {count}" for source, count in zip(group.sources, group.counts, strict=True)]
            _show_list(f"left out in {plural(len(counts), 'file')}, {group.reason}", counts, is_counted=True)
        else:
            _show_list(f"left out, {group.reason}", group.sources)
    groups = [", ".join(group) for group in found.near_duplicates]
    _show_list("near-duplicates, or with a long passage in common, groups", groups)
    _show_list("look like templates, but would be read", found.templates)
    _show_list("look like drawings, but would be read", found.drawings)
    if found.boilerplate_share >= MIN_BOILERPLATE:
        out.print(f"boilerplate: {percent(found.boilerplate_share, 0)} of the tokens are in lines of many documents")
    rates = [f"{each.document} ({each.tokens_per_character:.2f})" for each in found.badly_read]
    usual = f"{found.tokens_per_character:.2f}"
    _show_list(f"read badly by this tokenizer, tokens per character (usually {usual})", rates)
    print_table(["split", "documents", "tokens"], [[p.name, f"{p.documents:,}", f"{p.tokens:,}"] for p in found.split])
    for number, example in enumerate(found.rendered, start=1):
        _show_example(number, example)
    for concern in found.concerns:
        out.print(f"[yellow]concern:[/] {escape(concern)}")
    for sentence in found.expectations:
        out.print(escape(printable(name_owner(sentence, found.authors))), style="dim")
    out.print(f"[{'yellow' if found.refusal else 'green'}]{escape(found.summary)}[/]")


def _show_list(title: str, lines, *, is_counted: bool = False) -> None:
    if lines:
        out.print(hanging(out, title + ("" if is_counted else f": {len(lines):,}")))
        for line in lines[:MAX_LINES]:
            out.print(hanging(out, printable(line), indent=2), style="dim")
        if len(lines) > MAX_LINES:
            out.print(f"  and {len(lines) - MAX_LINES:,} more (--json lists them all)", style="dim")


def _show_example(number: int, example) -> None:
    """Prints an example without the model's marks; runs are marked by words, and by colours on a terminal."""
    counts = f"{example.trained_tokens:,} of {example.tokens:,} tokens trained"
    out.print(f"\n[bold]example {number}[/] [dim]{escape(printable(example.document))}, {counts}[/]")
    for piece in example.pieces:
        if not (text := _MARKS.sub("", piece.text)):
            continue
        word, style = ("trained", "green") if piece.trained else ("given", "dim")
        out.print(f"  {word:<8} [{style}]{escape(_one_line(text))}[/]")
    out.print()


def _one_line(text: str) -> str:
    """Returns a run in one line, without its middle if it is long."""
    if len(text) > MAX_RUN:
        left_out = f" [... {len(text) - MAX_RUN:,} characters ...] "
        text = text[: MAX_RUN // 2] + left_out + text[-MAX_RUN // 2 :]
    return printable(text.replace("\n", " ⏎ ").replace("\t", "    "))
