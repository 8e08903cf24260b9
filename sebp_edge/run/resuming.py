"""Begins adaptations and forgetting as jobs, and goes on with them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from sebp_edge.errors import Interrupted, JobError, OptionError, Paused
from sebp_edge.machine import devices
from sebp_edge.run.adaptation_job import AdaptationJob
from sebp_edge.run.adapting import Options, adapt, adapt_again
from sebp_edge.run.forgetting import Forgetting, begin_forgetting, end_forgetting
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.saving import Place
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.store.erasure import Receipt
from sebp_edge.store.stored_jobs import Job
from sebp_edge.values.folder import Folder

CHANGED = ("refuse", "without", "again")
Result = TypeVar("Result")


def run_with_waits(call: ModelCall, texts, run: Callable[[], Result]) -> Result:
    """Runs a training. If it frees its memory to wait for other programs, goes on with it then.

    Documents that change meanwhile are left for the next adaptation.
    """
    devices.refuse_several_processes()
    call.giving_way.wait_from_now_on()
    while True:
        try:
            return run()
        except Paused as error:
            paused = error.with_traceback(None)  # whose frames hold the texts
        if not call.giving_way.frees:
            raise paused
        call.interruptions.begin_again()
        call.giving_way.wait_for(paused)
        job = call.store.jobs.get(paused.job)
        run = partial(resume, call, job, texts, "without")


def run_adapt(
    call: ModelCall, place: Place, texts, options: dict, work: AdaptationJob | None = None
) -> AdaptResult | UnchangedResult:
    """Adapts: see `Personalizer.adapt`, whose other arguments are the options.

    Args:
        work: the job that it goes on with; None to begin one.
    """
    place.store.check_writable(place.name, place.out)
    work = work or AdaptationJob.begin(call, place, "adapt", options, texts)
    with work.running(call):
        known = {field.name: options[field.name] for field in fields(Options)}  # a stored job may have others
        return adapt(call, place, texts, Options(**known), work)


def run_forget(
    call: ModelCall,
    place: Place,
    documents: str | Path | Sequence[str | Path],
    texts,
    options: dict,
    on_found: Callable[[Forgetting], None] | None = None,
    work: AdaptationJob | None = None,
) -> Receipt:
    """Forgets documents: see `Personalizer.forget`, whose other arguments are the options."""
    place.store.check_writable(place.name, place.out)
    call.job.begin()
    documents = [documents] if isinstance(documents, str | Path) else list(documents)
    if texts is not None:
        texts = [texts] if isinstance(texts, str | Path | Folder | dict) else list(texts)

    found, receipt = begin_forgetting(
        call, place.adapter, documents, texts, with_near_duplicates=options["near_duplicates"]
    )
    if found is not None:
        if on_found is not None:
            on_found(found)
        new = None
        if found.remaining is not None:
            begun = options | {"documents": tuple(one.hash for one in found.documents)}
            own = work or AdaptationJob.begin(call, place, "forget", begun, texts)
            with own.running(call):
                new = adapt_again(call, place, found.remaining, own, activate_anyway=options["activate_anyway"])
        receipt = end_forgetting(place.adapter, found, new, is_exact=call.device.type == "cpu")
    if work is not None:
        work.job.remove()
    call.in_use.leave_deleted_adapter(call.job)
    call.interruptions.complete(Interrupted(f"Interrupted after forgetting; the receipt is {receipt.path!r}."))
    return receipt


def resume(call: ModelCall, job: Job, texts, changed: str) -> AdaptResult | UnchangedResult | Receipt:
    """Goes on with a job: see `Personalizer.resume`."""
    if changed not in CHANGED:
        raise OptionError(f"changed is {changed!r}; choose from {', '.join(CHANGED)}.")
    call, record = _call_of(job, call), job.record
    place, options = Place(call.store, record.adapter), dict(record.options)
    newest = max(place.adapter.versions()) if place.adapter.exists() else 0
    if job.state == "queued":
        begun = {"device": call.device.type, "politeness": asdict(call.giving_way.recorded)}
        job.update(settings=record.settings | begun, newest=newest)
    elif newest > record.newest:
        raise JobError(
            f"Version {newest} of the adapter {record.adapter!r} was saved after the training had begun; adapt again."
        )
    if texts is None and record.texts is not None:
        texts = [Folder(**each) for each in record.texts]
    if changed == "again" and record.fixed:
        with job.held():
            job.start_over()
    work = AdaptationJob(call.store, job, changed)
    # As many threads as it began with, since another number rounds differently.
    with devices.limited_threads(job.arguments()["politeness"].threads):
        if record.kind == "forget":
            documents = [Path(one) if Path(str(one)).is_absolute() else one for one in options.pop("documents")]
            return run_forget(call, place, documents, texts, options, work=work)
        if texts is None and call.recipe.questions is None:
            raise JobError("The training began with texts that are no files; give the same texts again (texts=).")
        return run_adapt(call, place, texts, options, work)


def _call_of(job: Job, call: ModelCall) -> ModelCall:
    """Returns the call with the job's id, recipe, seed and names; refuses another base model or device."""
    arguments = job.arguments()
    reference = call.reference
    for what, own, asked in (
        ("model", arguments["model"], reference.location if reference.has_path else reference.name),
        ("device", arguments["device"], call.device.type),
    ):
        if own not in (None, asked):
            raise OptionError(
                f"The job {job.id!r} was begun with the {what} {own!r}, and this Personalizer has {asked!r}; make one "
                "with Personalizer(**job.arguments())."
            )
    call.job.id = job.id
    return replace(call, recipe=arguments["recipe"], seed=arguments["seed"], me=tuple(arguments["me"]))
