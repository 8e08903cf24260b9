"""`sebp-edge adapt PATH...`: trains an adapter on texts and saves it."""

import ctypes
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from typer.core import TyperCommand

from sebp_edge.cli.base_model import personalizing
from sebp_edge.cli.console import NOT_BETTER, discard_output, err, print_json, say
from sebp_edge.cli.console import out as console
from sebp_edge.cli.forget import show_receipt
from sebp_edge.cli.options import (
    GpuShare,
    MostMemory,
    Polite,
    Request,
    Threads,
    Yes,
    name_option,
    path_option,
    takes_request,
)
from sebp_edge.cli.owner import name_owner, whose_words
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.hub_cache import local_folder
from sebp_edge.errors import Interrupted, OptionError, SebpEdgeError
from sebp_edge.events import NameInUse
from sebp_edge.machine.host import free_host_memory, gpu_use_at_first
from sebp_edge.machine.politeness import Politeness, lower_priority
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.documents import printable

if TYPE_CHECKING:
    from sebp_edge.run.result import AdaptResult

# The options that go with --resume; a job knows the others.
_WITH_RESUME = {"paths", "include", "exclude", "resume", "changed", "memory", "as_json", "yes", "polite", "gpu_share"}
# What may follow --resume as a value by itself; apps choose ids of their own, which need --resume=JOB.
_JOB = re.compile("[0-9a-f]{6}|[0-9a-f]{12}")
# The last screen, never longer than a terminal; what does not fit is in the adapter's report.
LINES, COLUMNS = 15, 80
# Its paragraphs in the order in which they stand.
HEADLINE, ACCOUNT, WARNING, EXPECTATION, COMMAND = range(5)
_CHUNK_BYTES = 2**23


class AdaptCommand(TyperCommand):
    """A command whose option --resume may stand without a value, and goes with few others."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        pairs = zip(args, [*args[1:], ""], strict=False)
        args = ["--resume=" if one == "--resume" and not _JOB.fullmatch(other) else one for one, other in pairs]
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx) if ctx.params.get("resume") is not None else ():
            source = ctx.get_parameter_source(parameter.name)
            if source is not None and source.name == "COMMANDLINE" and parameter.name not in _WITH_RESUME:
                raise typer.BadParameter(f"{parameter.opts[0]} does not go with --resume; the job knows it.", ctx)
        return rest


@takes_request()
def adapt(
    request: Request,
    name: Annotated[
        str | None, name_option("Name of the adapter; by default 'default', or 'reader' with the recipe ask.")
    ] = None,
    out: Annotated[Path | None, path_option("Save into this new folder instead.", "FOLDER")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load the model in 4 bits; by default as in the recipe.")
    ] = None,
    activate_anyway: Annotated[
        bool, typer.Option("--activate-anyway", help="Activate the adapter whatever the gate says.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: learn all documents again.")] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Forget documents that are gone; if there are any, start over.")
    ] = False,
    keep_samples: Annotated[
        bool, typer.Option("--keep-samples", help="Save the samples, which contain your text, for the adapter's page.")
    ] = False,
    yes: Yes = False,
    resume: Annotated[
        str | None, typer.Option(metavar="[JOB]", help="Go on with a training that was stopped, paused or killed.")
    ] = None,
    changed: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="With --resume, if texts have changed: refuse (default), without or again."),
    ] = None,
    memory: MostMemory = None,
    polite: Polite = False,
    threads: Threads = None,
    gpu_share: GpuShare = None,
) -> None:
    """Train an adapter on the texts in PATH; activate it if it is better than the base and the active version.

    If the adapter exists, train on what is new or has changed, and do nothing if there is no such document. If it was
    made from other texts, for another model or with another recipe, say so first; on a terminal, propose a name. Ask,
    too, before anything is learnt in a folder that is not notes, such as your home folder; in a pipe, pass --yes.

    --resume needs no other option, since the job knows them; `sebp-edge jobs` lists the jobs. Give PATH only if the
    texts were moved.

    Exit codes: 0 better or nothing to do, 3 saved but not active (the active version stays), 130 interrupted, 2 invalid
    option, 1 any other error, or the answer is no.
    """
    texts, as_json = request.texts, request.as_json
    own = {} if memory is None else {"memory_budget": memory}
    if polite or threads is not None or gpu_share is not None:
        own["politeness"] = Politeness.of(polite, threads, gpu_share)
    if resume is not None:
        _resume(resume or None, texts, own, changed or "refuse", as_json=as_json)
        return
    if not (yes or request.settings["recipe"].questions):
        _ask_about_folders(texts, as_json=as_json)
    recipe = request.settings["recipe"].replace(load_in_4bit=load_in_4bit)
    settings, name = request.settings | {"recipe": recipe}, name or recipe.default_name
    before = None
    while out is None and name != before:
        texts, active, unchanged = _compare(texts, name, settings, fresh=fresh, sync=sync)
        if unchanged is not None:
            say(unchanged.to_dict(), unchanged.summary, as_json=as_json)
            return
        before = name
        if active is not None and active.name_in_use is not None:
            name = _ask_for_name(active.name_in_use, as_json=as_json, yes=yes)

    options = {"activate_anyway": activate_anyway, "fresh": fresh, "sync": sync, "keep_samples": keep_samples}
    _run(settings | own, {"texts": texts, "name": name, "out": out} | options, options, as_json=as_json)


def _resume(id: str | None, texts, own: dict, changed: str, *, as_json: bool) -> None:
    """Goes on with a job, or with the only one that does not run; `own` arguments take the place of the job's."""
    job = AdapterStore().jobs.get(id)
    arguments = {"job": job.id, "texts": texts, "changed": changed}
    is_forget = job.record.kind == "forget"
    _run(job.arguments() | own, arguments, job.record.options, as_json=as_json, is_forget=is_forget)


def _run(settings: dict, arguments: dict, options: dict, *, as_json: bool, is_forget: bool = False) -> None:
    """Adapts, or resumes if the arguments name a job, and shows the progress and the result.

    Exits with NOT_BETTER if the adapter is saved and not active.

    Args:
        settings: arguments of `Personalizer`.
        arguments: those of its `adapt` or `resume`.
        options: those of the call that is a job.
    """
    if settings.get("politeness", Politeness()).waits:
        lower_priority()
    begin_ahead(settings["model"], settings.get("device"))
    result = None
    try:
        # That the name is in use has been said already.
        with personalizing(as_json, hides=NameInUse, **settings) as personalizer:
            result = personalizer.resume(**arguments) if "job" in arguments else personalizer.adapt(**arguments)
        if is_forget:
            show_receipt(result, as_json=as_json)
        elif result.unchanged:
            say(result.to_dict(), result.summary, as_json=as_json)
        elif as_json:
            print_json(result.to_dict())
        else:
            show_result(result, with_samples=options.get("keep_samples", False))
    except BrokenPipeError:
        # The reader is gone, but the exit code still says whether the adapter is better.
        if result is None:
            raise
        discard_output()
    except KeyboardInterrupt as stop:
        if result is None:
            raise
        raise Interrupted(f"Interrupted after the training. {result.summary}") from stop
    if is_forget or result.unchanged:
        return
    if result.overtaken_by is not None or not (result.passed or options["activate_anyway"]):
        raise typer.Exit(NOT_BETTER)


def begin_ahead(model: str | Path, device: str | None) -> list[Thread]:
    """Does what needs no library while these are imported: reads the weights, and starts the GPU's driver.

    Each takes up to seconds, in which Python's lock is free. Errors are left to those who need the file or GPU next.
    Returns the threads, without the GPU's if the device is another one.
    """
    threads = [Thread(target=_read_weights, args=(model,), name="sebp-edge weights ahead", daemon=True)]
    if device is None or device.startswith("cuda"):
        number = (device or "").partition(":")[2]
        index = int(number) if number.isdecimal() else 0
        threads.append(Thread(target=_start_gpu, args=(index,), name="sebp-edge GPU ahead", daemon=True))
    for thread in threads:
        thread.start()
    return threads


def _start_gpu(index: int) -> None:
    """Makes the context of an NVIDIA GPU that torch's CUDA runtime uses, too; first, asks what is in use without it."""
    gpu_use_at_first()
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, but the driver reads it only once
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def _read_weights(model: str | Path) -> None:
    """Reads a model's weights into the page cache, unless they would take most of the free memory."""
    with suppress(OSError, SebpEdgeError):
        path = local_folder(resolve(model))
        files = [] if path is None else [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if 2 * sum(file.stat().st_size for file in files) > free_host_memory():
            return
        chunk = bytearray(_CHUNK_BYTES)
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(chunk):
                    pass


def _compare(texts, name: str, settings: dict, *, fresh: bool, sync: bool):
    """Compares an adaptation with the active version of its name, without importing torch.

    Returns:
        The texts, or what was read of them; the active version beside them; and the result if nothing is new.
    """
    from sebp_edge.run.fitting_recipe import choose_recipe, read_for
    from sebp_edge.run.texts_comparison import compare_with_active
    from sebp_edge.run.unchanged import find_unchanged

    store = AdapterStore()
    adapter = store.adapter(name)
    if adapter.active() is None:
        return texts, None, None
    recipe, model = settings["recipe"], resolve(settings["model"])
    reading = read_for(recipe, texts, me=settings["me"])
    recipe = choose_recipe(recipe, reading, model, None if fresh else adapter)
    active = compare_with_active(store, name, model, recipe, settings["seed"], reading)
    unchanged = find_unchanged(adapter, active, reading, fresh=fresh, sync=sync)
    return None if recipe.questions else reading, active, unchanged


def _ask_about_folders(texts, *, as_json: bool) -> None:
    """Asks before anything is learnt in a folder that is not notes, unless patterns say what to read in it.

    Raises:
        OptionError: nobody can be asked.
        typer.Exit: the answer is no.
    """
    from sebp_edge.reading.find_files import reason_against_notes

    # What was read already was asked about.
    for folder in texts if isinstance(texts, list) else ():
        found = None if folder.include else reason_against_notes(folder.path)
        if found is None:
            continue
        if as_json or not (sys.stdin.isatty() and err.is_terminal):
            raise OptionError(f"{found}; give the folder of your notes, or pass --yes to learn what can be read there.")
        err.print(f"{found}.", style="yellow", markup=False)
        if not typer.confirm("Learn what can be read there?", err=True):
            raise typer.Exit(1)


def _ask_for_name(event: NameInUse, *, as_json: bool, yes: bool) -> str:
    """Says that the name has another adapter, and returns the name to go on with; on a terminal, asks which."""
    if as_json:
        print_json(event)
        return event.name
    err.print(f"note: {event.message}", style="yellow", markup=False)
    if yes or not (sys.stdin.isatty() and err.is_terminal):
        return event.name
    takes_it = typer.confirm(f"Name it {event.proposal!r} instead?", default=True, err=True)
    return event.proposal if takes_it else event.name


def show_result(result: "AdaptResult", *, with_samples: bool = False) -> None:
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
        lines = paragraph.wrap(console, COLUMNS)
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
        console.print(paragraph)
