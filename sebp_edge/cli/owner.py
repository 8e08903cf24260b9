"""Asks on a terminal which of the people in chats and mails the owner of the texts is."""

import sys

import typer

from sebp_edge.basics.units import plural
from sebp_edge.cli.console import err
from sebp_edge.errors import OwnerUnknown
from sebp_edge.values.chats import OWNER
from sebp_edge.values.documents import printable

# Number of people that are listed.
MAX_PEOPLE = 20


def describe_author(author) -> str:
    """Returns a line about somebody who wrote in chats."""
    you = " (you)" if author.is_owner else ""
    name = author.name if author.name == author.id else f"{author.name} <{author.id}>"
    return f"{name}{you}, {author.service}: {plural(author.num_messages, 'message')}"


def name_owner(expectation: str, authors) -> str:
    """Returns what to expect, with the owner's name in it; nothing that is saved has it."""
    names = {author.name for author in authors if author.is_owner} - {OWNER}
    return expectation.replace("as you do", f"as {names.pop()} does") if len(names) == 1 else expectation


def whose_words(authors) -> str:
    """Returns whose words are learnt; in an export that names its owner, nobody was asked."""
    owners = [author for author in authors if author.is_owner]
    learnt = (f"{author.name} in {author.service} ({plural(author.num_messages, 'message')})" for author in owners)
    return f"The words learnt are those of {', '.join(learnt)}." if owners else ""


def ask_for_owner(error: OwnerUnknown, *, as_json: bool) -> tuple[str, ...]:
    """Returns the ids of the people whose words are to be learnt.

    Raises:
        OwnerUnknown: nobody can be asked.
    """
    if as_json or not (sys.stdin.isatty() and err.is_terminal):
        raise error
    authors = error.reading.authors[:MAX_PEOPLE]
    err.print(f"Found {' and '.join(error.reading.exports)}.", markup=False)
    for number, author in enumerate(authors, start=1):
        err.print(f"{number:>3}  {printable(describe_author(author))}", markup=False, highlight=False)
    answer = typer.prompt("Which of them are you? Numbers, or names, with commas", err=True)
    chosen = [part.strip() for part in answer.split(",") if part.strip()]
    numbers = {str(number): author.id for number, author in enumerate(authors, start=1)}
    return tuple(numbers.get(part, part) for part in chosen)
