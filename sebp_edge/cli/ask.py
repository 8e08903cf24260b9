"""`sebp-edge ask QUESTION PATH`: answers from texts, and says where the answer stands."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from sebp_edge.ask.answer import NUM_PASSAGES, Answer
from sebp_edge.ask.sentences import line_of
from sebp_edge.cli import console
from sebp_edge.cli.base_model import choose_model, personalizer_class
from sebp_edge.cli.options import AdapterModel, Device, Exclude, Include, Json, Threads, name_option, select
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import OptionError, TextsError
from sebp_edge.machine.politeness import Politeness
from sebp_edge.recipe import READER
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.documents import printable, printable_lines


def ask(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[QUESTION] PATH...", help="A question, and files or folders with your texts."),
    ],
    include: Include = None,
    exclude: Exclude = None,
    name: Annotated[str | None, name_option("Name of an adapter; by default the model's reader.")] = None,
    model: AdapterModel = None,
    passages: Annotated[
        int, typer.Option(min=1, help="Maximum number of passages that the model is shown.")
    ] = NUM_PASSAGES,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Answer a question from your texts, and say where the answer stands.

    Without QUESTION, ask in a conversation, or answer each line of the standard input.
    """
    with console.one_sentence_errors(as_json=as_json, takes_time=True):
        question, paths = _question_and_paths(arguments)
        if question is None and as_json and sys.stdin.isatty():
            raise OptionError("A conversation prints no JSON; give a question before the paths, or leave out --json.")
        texts = select(paths, include, exclude)
        answers = _Answers(texts, name, model, passages, device=device, politeness=Politeness.of(threads=threads))
        if question is None:
            _answer_each(answers, as_json)
            return
        answer = answers.get(question)
        _show(answer, question, as_json)
        if answer.quoted:
            answers.advise()


class _Answers:
    """Answers questions: with the reader, if there is one, else with sentences, which takes no torch."""

    def __init__(self, texts, name: str | None, model: str | None, passages: int, **settings):
        with console.without_collection("reading"):
            # Imported late, since its readers of files take a while.
            from sebp_edge.run import asking

            self._texts, self._passages, self._quote = texts, passages, asking.quote
            self._searched, self._personalizer = asking.SearchedTexts(), None
            self._adapter = {} if name is None else {"adapter": name}
            self._model, self._settings = model and resolve(model), None
            reader = asking.find_reader(AdapterStore(), self._model) if name is None else None
            if reader is not None or name is not None:
                self._settings = settings | choose_model(name or READER, reader and reader.version, model)[0]

    def get(self, question: str, before: Sequence[tuple[str, str]] = ()) -> Answer:
        """Returns the answer to a question, after others with their answers."""
        with console.err.status("reading", spinner="line"):
            index = self._searched.index(self._texts)
            answer = self._quote(question, index, self._passages, before[-1][0] if before else "")
        if self._settings is None or answer.is_final:
            return answer
        if self._personalizer is None:
            self._personalizer = personalizer_class(self._settings["model"])(**self._settings)
        with console.err.status("reading", spinner="line"):
            asked = {"before": before, "num_passages": self._passages, **self._adapter}
            return self._personalizer.ask(question, index, **asked)

    def advise(self) -> None:
        """Says on a terminal how to have a model answer, if none does."""
        if self._settings is None and console.err.is_terminal:
            model = self._model
            named = shlex.quote(model.location if model.has_path else model.name) if model else "NAME"
            advice = f"To have a model answer, not a quotation: sebp-edge adapt --recipe ask --model {named}"
            console.err.print(advice, style="dim", markup=False)


def _question_and_paths(arguments: list[str]) -> tuple[str | None, list[Path]]:
    """Takes the first argument for a question unless it is a path."""
    first, *rest = arguments
    try:
        is_path = Path(first).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        is_path = False  # too long for a path
    if is_path:
        return None, [Path(each) for each in arguments]
    if not rest:
        raise OptionError("One argument was given, which is no path; give a question and files or folders.")
    return first, [Path(each) for each in rest]


def _answer_each(answers: _Answers, as_json: bool) -> None:
    """Answers what is typed, or each line of the input with a line, which is empty if the question is refused."""
    is_typed, before = sys.stdin.isatty(), []
    if is_typed:
        answers.advise()
    for question in _typed() if is_typed else _lines():
        try:
            answer = answers.get(question, before)
        except TextsError as error:  # of this question, so another one may be asked
            console.print_error(str(error))
            if not is_typed:
                console.print_json(error.to_dict()) if as_json else typer.echo()
        else:
            before += [(question, answer.text)] if is_typed else []
            _show(answer, question, as_json, on_one_line=not is_typed)


def _typed() -> Iterator[str]:
    """Yields the questions that are typed, until an empty line or the end of the input."""
    with contextlib.suppress(ImportError):  # on Windows, whose terminals edit lines themselves
        import readline  # noqa: F401  lets `input` edit lines, and go back to earlier ones
    console.out.print("Ask about your texts; an empty line ends.", style="dim")
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


def _lines() -> Iterator[str]:
    """Yields the lines of the standard input that are not empty."""
    sys.stdin.reconfigure(errors="surrogateescape")  # so that only a question that is not UTF-8 is refused
    question = None
    for question in filter(None, map(str.strip, sys.stdin)):
        yield question
    if question is None:
        raise OptionError("No question was given; give one before the paths, or one on each line of the input.")


def _show(answer: Answer, question: str, as_json: bool, *, on_one_line: bool = False) -> None:
    said, places = printable_lines(f'"{answer.text}"' if answer.quoted else answer.text), _places(answer)
    if as_json:
        if answer.found and not answer.quoted:
            console.print_chunk(answer.text, as_json=True)
        console.print_json({"event": "result", "result_of": "ask", "question": question, **asdict(answer)})
    elif on_one_line:
        typer.echo("\t".join([said.replace("\n", " / "), *places[:1]]))
    elif answer.sentences:
        for line, place in zip(said.split("\n"), places, strict=True):
            console.out.print(line, markup=False)
            console.out.print(f"    {place}", style="dim", markup=False)
    else:
        console.out.print(said, markup=False)
        for place in places:
            console.out.print(place, style="dim", markup=False)
        if answer.quoted and console.out.is_terminal:
            _show_around(answer)


def _show_around(answer: Answer) -> None:
    """Shows the passage around a quotation: it holds the answer more often than its best sentence does."""
    passage, quotation = map(printable_lines, (answer.sources[0].text, answer.sentence))
    if quotation != passage.strip():
        around = Text(passage, style="dim")
        around.highlight_words([quotation], "not dim")
        console.out.print(Padding(around, (1, 0, 0, 4), expand=False))


def _places(answer: Answer) -> list[str]:
    """Returns where the sources stand, the first one with the line of the answer."""
    lines = [line_of(said, each) for said, each in zip(answer.sentences, answer.sources, strict=False)]
    lines = lines or [answer.line, *(source.line for source in answer.sources[1:])]
    return [f"{printable(each.place)}, line {line}" for each, line in zip(answer.sources, lines, strict=False)]
