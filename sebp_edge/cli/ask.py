"""`sebp-edge ask QUESTION PATH`: answers from texts, and says where the answer stands."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.ask.answer import NOT_FOUND, NUM_PASSAGES, Answer, is_found
from sebp_edge.cli.base_model import choose_model, personalizer_class
from sebp_edge.cli.console import one_sentence_errors, out, print_chunk, print_error, print_json
from sebp_edge.cli.options import Device, Exclude, Include, Json, Threads, select
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import OptionError, TextsError
from sebp_edge.machine.politeness import Politeness
from sebp_edge.recipe import READER
from sebp_edge.values.documents import check_text, printable


def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[QUESTION] PATH...", help="A question, and files or folders with your texts."),
    ],
    include: Include = None,
    exclude: Exclude = None,
    name: Annotated[
        str | None, typer.Option(help="Name of an adapter; without --model, by default 'reader' or 'default'.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Base model; by default the adapter's.")] = None,
    passages: Annotated[
        int, typer.Option(min=1, help="Maximum number of passages that the model is shown.")
    ] = NUM_PASSAGES,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Answer a question from your texts, and say where the answer stands. Without QUESTION, ask in a conversation."""
    with one_sentence_errors(as_json=as_json, takes_time=True):
        question, paths = _question_and_paths(arguments)
        if question is None and as_json:
            raise OptionError("A conversation prints no JSON; give a question before the paths, or leave out --json.")
        texts = select(paths, include, exclude)
        settings, adapter = choose_model(name, None, model, defaults=(READER, "default"))
        settings |= {"device": device, "politeness": Politeness.of(threads=threads)}
        reference = resolve(settings["model"])
        if question is not None:
            index = _search(question, texts, passages)
            if index is None:  # without a model, whose libraries take seconds to import
                _show(Answer(NOT_FOUND, found=False), question, as_json)
                return
            personalizer = personalizer_class()(**settings)
            answer = _answer(personalizer, question, index, [], adapter, passages, as_json)
            if answer.quoted and adapter != READER and out.is_terminal and not as_json:
                named = shlex.quote(reference.location if reference.has_path else reference.name)
                advice = f"sebp-edge adapt --recipe ask --model {named} trains the model to read."
                out.print(advice, style="dim", markup=False)
            return
        personalizer, before = personalizer_class()(**settings), []
        for asked in _typed():
            try:
                answer = _answer(personalizer, asked, texts, before, adapter, passages, as_json)
            except TextsError as error:  # of this question, so another one may be asked
                print_error(str(error))
            else:
                before.append((asked, answer.text))


def _search(question: str, texts, passages: int):
    """Returns the index of texts; None if no passage is about the question."""
    # Imported late, since its readers of files take a while.
    from sebp_edge.ask.searched_texts import SearchedTexts

    check_text(question, "The question")
    index = SearchedTexts().index(texts)
    return index if is_found(index.search(question, passages)) else None


def _question_and_paths(arguments: list[str]) -> tuple[str | None, list[Path]]:
    """Takes the first argument for a question unless it is a path; without a question there must be a terminal."""
    first, *rest = arguments
    try:
        is_path = Path(first).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        is_path = False  # too long for a path
    if not is_path:
        if not rest:
            raise OptionError("One argument was given, which is no path; give a question and files or folders.")
        return first, [Path(each) for each in rest]
    if not sys.stdin.isatty():
        raise OptionError("No question was given; give one before the paths, or start the command on a terminal.")
    return None, [Path(each) for each in arguments]


def _typed() -> Iterator[str]:
    """Yields the questions that are typed, until an empty line or the end of the input."""
    with contextlib.suppress(ImportError):  # on Windows, whose terminals edit lines themselves
        import readline  # noqa: F401  lets `input` edit lines, and go back to earlier ones
    out.print("Ask about your texts; an empty line ends.", style="dim")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt) as end:
            typer.echo()
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        if not question:
            return
        yield question


def _answer(personalizer, question: str, texts, before, adapter, passages: int, as_json: bool):
    streams = as_json or out.is_terminal
    streamed: list[str] = []

    def stream(chunk: str) -> None:
        streamed.append(chunk)
        print_chunk(chunk, as_json=as_json)

    try:
        answer = personalizer.ask(
            question,
            texts,
            before=before,
            adapter=adapter,
            num_passages=passages,
            on_text=stream if streams else None,
        )
    finally:
        if streamed and not as_json:
            typer.echo()
    _show(answer, question, as_json, is_streamed=bool(streamed))
    return answer


def _show(answer: Answer, question: str, as_json: bool, *, is_streamed: bool = False) -> None:
    if as_json:
        print_json({"event": "result", "result_of": "ask", "question": question, **asdict(answer)})
        return
    if answer.quoted:
        out.print("The model's reply is not in your notes; the closest passage says:", style="dim")
    if answer.quoted or not is_streamed:
        out.print(answer.text, markup=False)
    for source in answer.sources:
        out.print(f"{printable(source.place)}, line {source.line}", style="dim", markup=False)
