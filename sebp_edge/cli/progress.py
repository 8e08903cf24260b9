"""Shows progress: a progress bar on a terminal, plain lines on a pipe, JSON lines for programs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from sebp_edge import events
from sebp_edge.basics.units import duration, gigabytes, percent, plural, sizes_apart
from sebp_edge.cli.console import JOB, discard_output, err, hanging, out
from sebp_edge.events import Event, JsonLines, Sink
from sebp_edge.values.documents import LeftOut

MAX_LEFT_OUT_LINES = 10
# More things that are left out for the same reason are one line.
MAX_OF_A_KIND = 3
# What phases of a call are called.
_PHASES = {
    "reading": "reading the texts",
    "comparing": "comparing the texts",
    "tokenising": "tokenising the texts",
    "planning": "planning the memory",
    "loading": "loading the model",
    "replies": "asking the base model",
    "teacher": "reading general text",
    "active version": "testing the active version",
    "attaching": "preparing the training",
    "train": "training",
    "all documents": "training",
    "quiz before": "asking the base model",
    "quiz": "asking the adapted model",
    "samples": "writing samples",
    "general text": "testing on general text",
    "copies": "searching for copies",
    "waiting": "waiting",
    "gradients": "analyzing the gradients",
    "writing": "writing the files",
    "reading back": "reading them back",
}
SECONDS_BETWEEN_LINES = 5
# In characters; a progress bar in a narrower window leaves out the step and the loss.
MIN_WIDTH_FOR_FIGURES = 70


@contextmanager
def show_progress(as_json: bool, *, hides: type | tuple = (), lists_left_out: bool = True) -> Iterator[Sink]:
    """Yields the sink for this output, which lists what was left out of the texts, or only says how much that is.

    It does not show the events that it `hides`. Its first failed write interrupts the run as Ctrl-C does, so that the
    best state is saved. Writes fail if the reader goes away, as with `| head`, or if the disk is full.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[done]}"),
        TextColumn("{task.fields[figures]}"),
        TextColumn("{task.fields[left]}"),
    )
    has_bar, has_failed = out.is_terminal and not as_json, False
    with Progress(*columns, console=out, expand=True, transient=True) if has_bar else nullcontext() as bar:
        sink = JsonLines(sys.stdout, JOB) if as_json else ProgressPrinter(bar, lists_left_out=lists_left_out)

        def send(event: Event) -> None:
            nonlocal has_failed
            try:
                if not (has_failed or isinstance(event, hides)):
                    sink(event)
            except OSError as error:
                has_failed = True
                discard_output()
                raise KeyboardInterrupt from error

        yield send


def _done(whole: events.JobProgress) -> str:
    return f"{int(100 * whole.fraction):>3} %"


def _left(whole: events.JobProgress) -> str:
    """Returns the time left of the call; empty if it is unknown, or over."""
    return f"{duration(whole.seconds_left)} left" if whole.seconds_left else ""


class ProgressPrinter:
    """Prints events as text. The bar shows how far the whole call is; without a bar, a line does every few seconds."""

    def __init__(self, bar: Progress | None, *, lists_left_out: bool = True):
        self._bar, self._lists_left_out = bar, lists_left_out
        self._whole = events.JobProgress("", 0.0, None)
        self._last_print = time.monotonic()  # a refusal at once is the only line
        self._num_documents = self._num_trainings = 0
        if bar is not None:
            self._task = bar.add_task("starting", total=None, figures="", done="", left="")

    def __call__(self, event: Event) -> None:
        match event:
            case events.JobProgress():
                self._job_progress(event)
            case events.Notice() | events.NameInUse() | events.Waiting():
                self._print_note(escape(event.message))
            case events.JobStarted() if event.progress:
                out.print(f"going on at {percent(event.progress, 0)}")
            case events.MemoryPlanned():
                peak, budget = sizes_apart(event.peak, event.budget)
                out.print(f"plan: {event.description}; about {peak} of {budget}, about {duration(event.seconds)}")
            case events.MemoryProbed():
                predicted = "" if event.predicted is None else f", predicted {gigabytes(event.predicted)}"
                out.print(f"dry run: {gigabytes(event.peak)} with a micro-batch of {event.rows:,} tokens{predicted}")
            case events.ModelLoaded():
                millions = f"{event.parameters / 1e6:,.1f} million parameters"
                out.print(f"[bold]{escape(event.model)}[/]: {millions} on {event.device}, {event.dtype}")
            case events.TextsRead():
                self._texts_read(event)
            case events.LearningOn():
                self._learning_on(event)
            case events.TrainingStarted():
                self._training_started(event)
            case events.MemoryRanOut():
                self._print_note(f"memory ran out; micro-batches have at most {event.max_rows:,} tokens from now on")
            case events.MemoryPressure():
                self._print_note(
                    f"free memory is {gigabytes(event.shortfall)} too low, mostly because of other programs; "
                    f"micro-batches have at most {event.max_rows:,} tokens from now on"
                )
            case events.StepDone():
                self._step(event)
            case events.Evaluated():
                self._evaluated(event)
            case events.ExamplesEvaluated():
                self._show_figures(f"evaluating {event.done}/{event.examples}")

    def _print_note(self, message: str) -> None:
        # If both streams go to a terminal, the bar's console keeps a note above the bar.
        console = out if self._bar is not None and err.is_terminal else err
        console.print(f"[yellow]note:[/] {message}")

    def _job_progress(self, event: events.JobProgress) -> None:
        begins, self._whole = event.phase != self._whole.phase, event
        what = _PHASES.get(event.phase, event.phase)
        if self._bar is not None:
            figures = {"figures": ""} if begins else {}
            shown = {"description": what, "done": _done(event), "left": _left(event)}
            self._bar.update(self._task, total=1, completed=event.fraction, **shown, **figures)
        elif event.fraction < 1 and time.monotonic() - self._last_print > SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            out.print(f"{what}: {self._how_far()}")

    def _how_far(self) -> str:
        """Returns how far the whole call is, and the time that is left."""
        return ", ".join(filter(None, [_done(self._whole).strip(), _left(self._whole)]))

    def _show_figures(self, figures: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, figures=figures if out.width >= MIN_WIDTH_FOR_FIGURES else "")

    def _texts_read(self, event: events.TextsRead) -> None:
        self._num_documents = event.documents
        out.print(f"{plural(event.documents, 'document')}, {plural(event.tokens, 'token')}")
        if not self._lists_left_out and event.left_out:
            out.print(f"{len(event.left_out):,} left out; sebp-edge inspect says why")
            return
        if event.left_out:
            out.print(f"{len(event.left_out):,} left out:")
        lines = _left_out_lines([LeftOut(**each) for each in event.left_out])
        for _, line in lines[:MAX_LEFT_OUT_LINES]:
            out.print(hanging(out, line, indent=2), style="dim")
        if more := sum(number for number, _ in lines[MAX_LEFT_OUT_LINES:]):
            out.print(f"  and {more:,} more (--json lists them all)", style="dim")

    def _learning_on(self, event: events.LearningOn) -> None:
        out.print(event.summary)
        if event.gone:
            documents = f"{plural(event.gone, 'document')} of version {event.version}"
            verb, them = ("is", "it") if event.gone == 1 else ("are", "them")
            self._print_note(f"{documents} {verb} not among these texts, but still known; --sync forgets {them}")

    def _training_started(self, event: events.TrainingStarted) -> None:
        self._num_trainings += 1
        name = _PHASES.get(event.phase, event.phase)
        if event.phase == "all documents" and self._num_trainings > 1:
            name = "last training"
        trained, total = event.train_documents, self._num_documents
        documents = f"{trained:,} of {plural(total, 'document')}" if trained < total else plural(trained, "document")
        if event.validation_documents:
            documents += f", {event.validation_documents} for validation, {event.test_documents} for test"
        epochs = f"at most {event.epochs} epochs" if event.epochs > 1 else "1 epoch"
        out.print(f"{name}: {documents}; {epochs}")

    def _step(self, event: events.StepDone) -> None:
        steps, loss = f"step {event.step}/{event.steps}", f"loss {event.loss:.3f}"
        self._show_figures(f"{steps}  {loss}")
        is_due = time.monotonic() - self._last_print > SECONDS_BETWEEN_LINES
        if self._bar is None and (event.step in (1, event.steps) or is_due):
            self._last_print = time.monotonic()
            out.print(f"{steps}  {loss}  {event.tokens_per_second:,.0f} tokens/s  {self._how_far()}")

    def _evaluated(self, event: events.Evaluated) -> None:
        if event.split == "validation":
            when = f"after epoch {event.epoch}" if event.epoch else "before training"
            out.print(f"  {when}: validation loss {event.loss:.3f}{' (best)' if event.best and event.epoch else ''}")
        elif event.split == "train":
            out.print(f"  validation loss {event.loss:.3f}, on documents that it was trained on now")


def _left_out_lines(left_out: list[LeftOut]) -> list[tuple[int, str]]:
    """Returns lines with the number of things that each is about: many of one kind are a line with one of them."""
    kinds: dict[str, list[LeftOut]] = {}
    for each in left_out:
        kinds.setdefault(each.kind, []).append(each)
    lines = []
    for kind, found in kinds.items():
        if len(found) > MAX_OF_A_KIND:
            most = max(found, key=lambda each: each.number)
            in_part = f"in {len(found):,} files, {kind}: {most.count} in {most.source}"
            whole = f"{len(found):,}, such as {found[0].source}: {kind}"
            lines.append((len(found), in_part if " of " in most.count else whole))
        else:
            lines += [(1, f"{each.source}: {each.reason}") for each in found]
    return lines
