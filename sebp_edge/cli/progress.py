"""Shows progress: a progress bar on a terminal, plain lines on a pipe, JSON lines for programs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from sebp_edge.basics.units import duration, gigabytes, percent, plural, sizes_apart
from sebp_edge.cli.console import JOB, discard_output, err, out
from sebp_edge.events import (
    Evaluated,
    Event,
    ExampleAnalyzed,
    ExamplesEvaluated,
    JobProgress,
    JobStarted,
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
    Waiting,
)
from sebp_edge.texts.documents import LeftOut

MAX_LEFT_OUT_LINES = 10
# More things that are left out for the same reason are one line.
MAX_OF_A_KIND = 3
# What phases of a job, and stages of the preparation, are called.
_PHASES = {
    "reading": "reading the texts",
    "comparing": "comparing the texts",
    "tokenising": "tokenising the texts",
    "planning": "planning the memory",
    "loading": "loading the model",
    "replies": "asking the base model",
    "teacher": "reading general text",
    "active version": "testing the active version",
    "train": "training",
    "all documents": "training",
    "quiz before": "asking the base model",
    "quiz": "asking the adapted model",
    "samples": "writing samples",
    "general text": "testing on general text",
    "copies": "searching for copies",
    "waiting": "waiting",
}
SECONDS_BETWEEN_LINES = 5
SECONDS_BETWEEN_PREPARATION_LINES = 2
# In characters; a progress bar in a narrower window leaves out the loss.
MIN_WIDTH_FOR_LOSS = 70


@contextmanager
def show_progress(as_json: bool, *, lists_left_out: bool = True) -> Iterator[Sink]:
    """Yields the sink for this output, which lists what was left out of the texts, or only says how much that is."""
    if as_json:
        yield _interrupting(JsonLines(sys.stdout, JOB))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        _DoneColumn(),
        TextColumn("{task.fields[figures]}"),
        _TimeColumn(compact=True),
    )
    progress = Progress(*columns, console=out, expand=True, transient=True) if out.is_terminal else nullcontext()
    with progress as bar:
        yield _interrupting(ProgressPrinter(bar, lists_left_out=lists_left_out))


def _interrupting(sink: Sink) -> Sink:
    """Returns a sink whose first failed write interrupts the run as Ctrl-C does, so that the best state is saved.

    Writes fail if the reader goes away, as with `| head`, or if the disk is full.
    """
    has_failed = False

    def send(event: Event) -> None:
        nonlocal has_failed
        try:
            if not has_failed:
                sink(event)
        except OSError as error:
            has_failed = True
            discard_output()
            raise KeyboardInterrupt from error

    return send


class _DoneColumn(MofNCompleteColumn):
    """Shows the share of the whole job that is done, or what is done of a part; empty while neither is known."""

    def render(self, task: Task) -> Text:
        whole = task.fields["whole"]
        if whole is not None:
            return Text(f"{int(100 * whole.fraction):>3} %")
        return Text() if task.total is None else super().render(task)


class _TimeColumn(TimeRemainingColumn):
    """Shows the time left of the whole job, or of a part."""

    def render(self, task: Task) -> Text:
        whole = task.fields["whole"]
        if whole is not None:
            return Text(_left(whole))
        time_left = super().render(task)
        return time_left.append(" left in this part") if task.total is not None and task.time_remaining else Text()


def _left(whole: JobProgress) -> str:
    """Returns the time left of the whole job; empty if it is unknown, or over."""
    return f"{duration(whole.seconds_left)} left" if whole.seconds_left else ""


class ProgressPrinter:
    """Prints events as text. The bar shows the whole job, or its parts if the call does not tell how far the whole is.

    Without a bar, a line is printed every few seconds.
    """

    def __init__(self, bar: Progress | None, *, lists_left_out: bool = True):
        self._bar, self._lists_left_out = bar, lists_left_out
        self._task = None
        self._whole: JobProgress | None = None
        self._last_print = time.monotonic()  # a refusal at once is the only line
        self._stage = ""  # of the preparation
        self._num_documents = self._num_trainings = 0
        self._start_task("loading the model")

    def __call__(self, event: Event) -> None:
        match event:
            case JobProgress():
                self._job_progress(event)
            case Notice() | NameInUse() | Waiting():
                self._print_note(escape(event.message))
            case JobStarted() if event.progress:
                out.print(f"going on at {percent(event.progress, 0)}")
            case MemoryPlanned():
                peak, budget = sizes_apart(event.peak, event.budget)
                out.print(f"plan: {event.description}; about {peak} of {budget}, about {duration(event.seconds)}")
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
                self._part_done("gradients", event.example, event.examples)
            case TensorWritten():
                self._part_done("writing", event.tensor, event.tensors)
                if event.tensor == event.tensors:
                    self._start_task("reading it back")

    def _print_note(self, message: str) -> None:
        # If both streams go to a terminal, the bar's console keeps a note above the bar.
        console = out if self._bar is not None and err.is_terminal else err
        console.print(f"[yellow]note:[/] {message}")

    def _start_task(self, what: str, figures: str = "", total: int | None = None) -> None:
        if self._bar is None or self._whole is not None:  # then the job tells in which phase it is
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, figures=figures, whole=None)

    def _job_progress(self, event: JobProgress) -> None:
        begins, self._whole = self._whole is None or event.phase != self._whole.phase, event
        what = _PHASES.get(event.phase, event.phase)
        if self._bar is not None:
            figures = {"figures": ""} if begins else {}
            done = {"total": 1, "completed": event.fraction, "whole": event}
            self._bar.update(self._task, description=what, **done, **figures)
        elif event.fraction < 1 and time.monotonic() - self._last_print > SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            out.print(f"{what}: {int(100 * event.fraction)} %{self._time_left()}")

    def _time_left(self) -> str:
        left = _left(self._whole) if self._whole is not None else ""
        return left and f", {left}"

    def _preparing(self, event: PreparationProgress) -> None:
        if self._whole is not None:
            return
        what = _PHASES[event.stage]
        done = 100 * event.done // max(1, event.total)
        is_done = event.done == event.total > 0
        begins, self._stage = event.stage != self._stage, "" if is_done else event.stage
        if begins and not is_done:
            self._last_print = time.monotonic()
            self._start_task(what, total=100)
        elif is_done and event.stage in ("reading", "planning"):
            self._start_task("loading the model")
        elif self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._last_print > SECONDS_BETWEEN_PREPARATION_LINES:
            self._last_print = time.monotonic()
            out.print(f"{what}: {done} %")

    def _texts_read(self, event: TextsRead) -> None:
        self._num_documents = event.documents
        out.print(f"{plural(event.documents, 'document')}, {plural(event.tokens, 'token')}")
        self._start_task("preparing")
        if not self._lists_left_out and event.left_out:
            out.print(f"{len(event.left_out):,} left out; sebp-edge inspect says why")
            return
        if event.left_out:
            out.print(f"{len(event.left_out):,} left out:")
        lines = _left_out_lines([LeftOut(**each) for each in event.left_out])
        for _, line in lines[:MAX_LEFT_OUT_LINES]:
            out.print(f"  {escape(line)}", style="dim")
        if more := sum(number for number, _ in lines[MAX_LEFT_OUT_LINES:]):
            out.print(f"  and {more:,} more (--json lists them all)", style="dim")

    def _learning_on(self, event: LearningOn) -> None:
        out.print(event.summary)
        if event.gone:
            documents = f"{plural(event.gone, 'document')} of version {event.version}"
            verb, them = ("is", "it") if event.gone == 1 else ("are", "them")
            self._print_note(f"{documents} {verb} not among these texts, but still known; --sync forgets {them}")

    def _training_started(self, event: TrainingStarted) -> None:
        self._num_trainings += 1
        name = {"train": "training", "all documents": "training"}.get(event.phase, event.phase)
        if event.phase == "all documents" and self._num_trainings > 1:
            name = "last training"
        trained, total = event.train_documents, self._num_documents
        documents = f"{trained:,} of {plural(total, 'document')}" if trained < total else plural(trained, "document")
        if event.validation_documents:
            documents += f", {event.validation_documents} for validation, {event.test_documents} for test"
        out.print(f"{name}: {documents}; at most {plural(event.epochs, 'epoch')}")
        self._start_task(name, figures="evaluating")

    def _step(self, event: StepDone) -> None:
        is_last, loss = event.step == event.steps, f"loss {event.loss:.3f}"
        if self._bar is not None:
            done = {"completed": event.step, "total": event.steps} if self._whole is None else {}
            steps = "" if done else f"step {event.step}/{event.steps}  "
            figures = f"{steps}{loss}" if out.width >= MIN_WIDTH_FOR_LOSS else ""
            self._bar.update(self._task, figures=figures, **done)
        elif event.step == 1 or is_last or time.monotonic() - self._last_print > SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            whole = "" if self._whole is None else f"  {int(100 * self._whole.fraction)} %{self._time_left()}"
            out.print(f"step {event.step}/{event.steps}  {loss}  {event.tokens_per_second:,.0f} tokens/s{whole}")
        if is_last:  # the time of the steps is over, but the command is not
            self._start_task("testing")

    def _evaluated(self, event: Evaluated) -> None:
        if event.split == "validation":
            when = f"after epoch {event.epoch}" if event.epoch else "before training"
            out.print(f"  {when}: validation loss {event.loss:.3f}{' (best)' if event.best and event.epoch else ''}")
        elif event.split == "train":
            out.print(f"  validation loss {event.loss:.3f}, on documents that it was trained on now")
        if event.split == "test" and event.best:  # the training may have ended before its last step
            self._start_task("testing")

    def _part_done(self, what: str, done: int, total: int) -> None:
        if done == 1:
            self._start_task(what, total=total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)


def _left_out_lines(left_out: list[LeftOut]) -> list[tuple[int, str]]:
    """Returns lines with the number of things that each is about: many of one kind are a line with one of them."""
    kinds: dict[str, list[LeftOut]] = {}
    for each in left_out:
        kinds.setdefault(each.kind, []).append(each)
    lines = []
    for kind, found in kinds.items():
        if len(found) > MAX_OF_A_KIND:
            lines.append((len(found), f"{len(found):,}, such as {found[0].source}: {kind}"))
        else:
            lines += [(1, f"{each.source}: {each.reason}") for each in found]
    return lines
