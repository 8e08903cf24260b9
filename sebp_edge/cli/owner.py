"""Asks on a terminal which of the people in chats and mails the owner of the texts is."""

import sys

import typer

from sebp_edge.basics.units import plural
from sebp_edge.cli.console import err
from sebp_edge.errors import OwnerUnknown
from sebp_edge.texts.documents import printable

# Number of people that are listed.
MAX_PEOPLE = 20


def describe_author(author) -> str:
    """Returns a line about somebody who wrote in chats."""
    you = " (you)" if author.is_owner else ""
    name = author.name if author.name == author.id else f"{author.name} <{author.id}>"
    return f"{name}{you}, {author.service}: {plural(author.num_messages, 'message')}"


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
