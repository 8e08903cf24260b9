"""Shows progress and results: a progress bar on a terminal, plain lines on a pipe, JSON lines for programs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from sebp_edge.cli.console import discard_output, err, out
from sebp_edge.events import (
    Evaluated,
    Event,
    ExampleAnalyzed,
    ExamplesEvaluated,
    JsonLines,
    LearningOn,
    MemoryPlanned,
    MemoryPressure,
    MemoryProbed,
    MemoryRanOut,
    ModelLoaded,
    NameInUse,
    Notice,
    PreparationProgress,
    Sink,
    StepDone,
    TensorWritten,
    TextsRead,
    TrainingStarted,
)
from sebp_edge.result import AdaptResult
from sebp_edge.texts.documents import printable
from sebp_edge.units import duration, gigabytes

MAX_LEFT_OUT_LINES = 10
# Of the right and of the wrong ones.
MAX_ANSWERS = 3
_STAGES = {
    "planning": "planning the memory",
    "asking": "making questions",
    "interviewing": "letting the model write questions",
}
SECONDS_BETWEEN_LINES = 5
SECONDS_BETWEEN_PREPARATION_LINES = 2
# In characters; a progress bar in a narrower window leaves out the tokens per second.
MIN_WIDTH_FOR_SPEED = 60


@contextmanager
def show_progress(as_json: bool) -> Iterator[Sink]:
    """Yields the sink for this output. Its first failed write interrupts the run as Ctrl-C does."""
    if as_json:
        yield _InterruptOnFailedWrite(JsonLines(sys.stdout))
    elif out.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _StepColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=out, expand=True, transient=True) as bar:
            yield _InterruptOnFailedWrite(ProgressPrinter(bar))
    else:
        yield _InterruptOnFailedWrite(ProgressPrinter(None))


class _InterruptOnFailedWrite:
    """A sink whose first failed write interrupts the run as Ctrl-C does, so that the best state is saved.

    Writes fail if the reader goes away, as with `| head`, or if the disk is full.
    """

    def __init__(self, sink: Sink):
        self._sink: Sink | None = sink

    def __call__(self, event: Event) -> None:
        if self._sink is None:
            return
        try:
            self._sink(event)
        except OSError as error:
            self._sink = None
            discard_output()
            raise KeyboardInterrupt from error


class _StepColumn(MofNCompleteColumn):
    """Shows the steps done of all steps; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ProgressPrinter:
    """Prints events as text. Steps move the bar; without a bar, a step is printed every few seconds."""

    def __init__(self, bar: Progress | None):
        self._bar = bar
        self._task = None
        self._last_print = 0.0
        self._start_task("loading the model")

    def __call__(self, event: Event) -> None:
        match event:
            case Notice() | NameInUse():
                self._print_note(escape(event.message))
            case MemoryPlanned():
                memory = f"about {gigabytes(event.peak)} of {gigabytes(event.budget)}"
                out.print(f"plan: {event.description}; {memory}, about {duration(event.seconds)}")
            case MemoryProbed():
                predicted = "" if event.predicted is None else f", predicted {gigabytes(event.predicted)}"
                out.print(f"dry run: {gigabytes(event.peak)} with a micro-batch of {event.rows:,} tokens{predicted}")
            case ModelLoaded():
                millions = f"{event.parameters / 1e6:,.1f} million parameters"
                out.print(f"[bold]{escape(event.model)}[/]: {millions} on {event.device}, {event.dtype}")
                self._start_task("reading the texts")
            case PreparationProgress():
                self._preparing(event)
            case TextsRead():
                self._texts_read(event)
            case LearningOn():
                self._learning_on(event)
            case TrainingStarted():
                self._training_started(event)
            case MemoryRanOut():
                self._print_note(f"memory ran out; micro-batches have at most {event.max_rows:,} tokens from now on")
            case MemoryPressure():
                self._print_note(
                    f"free memory is {gigabytes(event.shortfall)} too low, mostly because of other programs; "
                    f"micro-batches have at most {event.max_rows:,} tokens from now on"
                )
            case StepDone():
                self._step(event)
            case Evaluated():
                self._evaluated(event)
            case ExamplesEvaluated():
                if self._bar is not None:
                    self._bar.update(self._task, figures=f"evaluating {event.done}/{event.examples}")
            case ExampleAnalyzed():
                self._analyzed(event)
            case TensorWritten():
                self._tensor_written(event)

    def _print_note(self, message: str) -> None:
        # If both streams go to a terminal, the bar's console keeps a note above the bar.
        console = out if self._bar is not None and err.is_terminal else err
        console.print(f"[yellow]note:[/] {message}")

    def _start_task(self, what: str, figures: str = "", total: int | None = None) -> None:
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, figures=figures)

    def _preparing(self, event: PreparationProgress) -> None:
        what = _STAGES.get(event.stage, f"{event.stage} the texts")
        percent = 100 * event.done // max(1, event.total)
        if event.done == 0:
            self._last_print = time.monotonic()
            self._start_task(what, total=100)
        elif event.done == event.total and event.stage in ("reading", "planning"):
            self._start_task("loading the model")
        elif self._bar is not None:
            self._bar.update(self._task, completed=percent)
        elif time.monotonic() - self._last_print > SECONDS_BETWEEN_PREPARATION_LINES:
            self._last_print = time.monotonic()
            out.print(f"{what}: {percent} %")

    def _texts_read(self, event: TextsRead) -> None:
        out.print(
            f"{_plural(event.documents, 'document')} in {_plural(event.examples, 'example')}, {event.tokens:,} tokens; "
            f"padded batches are {event.padding_share:.0%} padding"
        )
        if event.left_out:
            out.print(f"{len(event.left_out)} left out:")
        for item in event.left_out[:MAX_LEFT_OUT_LINES]:
            out.print(f"  {escape(item['source'])}: {escape(item['reason'])}", style="dim")
        if len(event.left_out) > MAX_LEFT_OUT_LINES:
            out.print(f"  and {len(event.left_out) - MAX_LEFT_OUT_LINES} more (--json lists them all)", style="dim")
        self._start_task("preparing")

    def _learning_on(self, event: LearningOn) -> None:
        out.print(event.summary)
        if event.gone:
            documents = f"{_plural(event.gone, 'document')} of version {event.version}"
            verb, them = ("is", "it") if event.gone == 1 else ("are", "them")
            self._print_note(f"{documents} {verb} not among these texts, but still known; --sync forgets {them}")

    def _training_started(self, event: TrainingStarted) -> None:
        documents = f"{_plural(event.train_documents, 'document')} for training"
        if event.validation_documents:
            documents += f", {event.validation_documents} for validation, {event.test_documents} for test"
        out.print(f"{event.phase}: {documents}; at most {_plural(event.epochs, 'epoch')}")
        self._start_task(event.phase, figures="evaluating")

    def _step(self, event: StepDone) -> None:
        figures = f"loss {event.loss:.3f}"
        if self._bar is None or out.width >= MIN_WIDTH_FOR_SPEED:
            figures += f"  {event.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=event.step, total=event.steps, figures=figures)
        elif event.step in (1, event.steps) or time.monotonic() - self._last_print > SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            out.print(f"step {event.step}/{event.steps}  {figures}  {duration(event.seconds_left)} left")

    def _evaluated(self, event: Evaluated) -> None:
        if event.split == "validation":
            when = f"after epoch {event.epoch}" if event.epoch else "before training"
            out.print(f"  {when}: validation loss {event.loss:.3f}{' (best)' if event.best and event.epoch else ''}")
        elif event.split == "train":
            out.print(f"  validation loss {event.loss:.3f}, on documents that it has seen now")

    def _analyzed(self, event: ExampleAnalyzed) -> None:
        if event.example == 1:
            self._start_task("gradients", total=event.examples)
        if self._bar is not None:
            self._bar.update(self._task, completed=event.example)

    def _tensor_written(self, event: TensorWritten) -> None:
        if event.tensor == 1:
            self._start_task("writing", total=event.tensors)
        if self._bar is not None:
            self._bar.update(self._task, completed=event.tensor)
        if event.tensor == event.tensors:
            self._start_task("reading it back")


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def show_result(result: AdaptResult) -> None:
    """Prints the figures, the samples, the warnings and the summary."""
    for figure, value in _figures(result).items():
        out.print(f"{figure:<15}{escape(value)}")
    _show_samples(result)
    _show_answers(result)
    out.print(escape(result.expectation), style="dim")
    for warning in result.warnings:
        out.print(f"[yellow]warning:[/] {escape(warning)}")
    out.print(f"[{'green' if result.kept else 'yellow'}]{escape(result.summary)}[/]")


def _figures(result: AdaptResult) -> dict[str, str]:
    """Returns the lines of the result, by name."""
    figures = {}
    if result.gain is not None:
        before, after = result.heldout_loss_before, result.heldout_loss_after
        figures["test loss"] = f"{before:.3f} → {after:.3f} nats per token ({-result.gain:+.1%})"
        figures["perplexity"] = f"{result.perplexity_before:.1f} → {result.perplexity_after:.1f}"
    if (quiz := result.quiz) is not None:
        figures["quiz"] = f"{quiz.right_before} → {quiz.right_after} of {quiz.questions} questions answered right"
        figures["with the note"] = (
            f"{quiz.right_with_note_before} → {quiz.right_with_note_after} of {quiz.questions_with_note}"
        )
    if (lines := result.boilerplate) is not None:
        change = lines.loss_after / lines.loss_before - 1
        figures["boilerplate"] = (
            f"{lines.loss_before:.3f} → {lines.loss_after:.3f} ({change:+.1%}), in lines of many documents, "
            f"{lines.share_of_tokens:.0%} of the tokens; not counted above"
        )
    if result.gain_over_active is not None:
        figures["active version"] = f"{-result.gain_over_active:+.1%} against version {result.compared_with}"
    general = result.general_loss_after / result.general_loss_before - 1
    figures["general text"] = f"{result.general_loss_before:.3f} → {result.general_loss_after:.3f} ({general:+.1%})"
    figures["time"] = f"{result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s in training"
    figures["peak memory"] = _format_peaks(result)
    version = f"{result.name}, version {result.version}: " if result.name else ""
    figures["saved"] = f"{version}{result.adapter_path}"
    return figures


def _show_samples(result: AdaptResult) -> None:
    """Prints how the base model, the version before and this one continue a few test documents."""
    if result.samples:
        out.print("\nhow documents continue that it was tested on:")
    for sample in result.samples:
        out.print(f"\n[bold]{escape(_one_line(sample.beginning))}[/] [dim]({escape(sample.document)})[/]")
        for who, text in (("base", sample.base), ("before", sample.before), ("now", sample.after)):
            if text is not None:
                out.print(f"  [dim]{who:<7}[/]{escape(_one_line(text))}")
    if result.samples:
        out.print()


def _show_answers(result: AdaptResult) -> None:
    """Prints a few answers of the quiz that are right, and a few that are wrong."""
    for right, heading in ((True, "answered right:"), (False, "answered wrong:")):
        shown = [each for each in result.answers if each.right is right][:MAX_ANSWERS]
        if shown:
            out.print(f"\n{heading}")
        for each in shown:
            out.print(f"  [bold]{escape(_one_line(each.question))}[/] {escape(_one_line(each.reply))}")
            if not right:
                out.print(f"    [dim]in the note: {escape(_one_line(each.answer))}[/]")
    if result.answers:
        out.print()


def _one_line(text: str) -> str:
    """Returns a text in one line, without characters that could control a terminal."""
    return printable(text.replace("\n", " ⏎ "))


def _format_peaks(result: AdaptResult) -> str:
    """Returns the peak memory of the process in one line."""
    line = gigabytes(result.peak_memory_bytes)
    if result.allocator_peak_bytes is not None:
        line += f" of GPU memory ({gigabytes(result.allocator_peak_bytes)} in tensors)"
    if result.predicted_peak_bytes is not None:
        line += f"; predicted {gigabytes(result.predicted_peak_bytes)}"
    return line
