"""What the protocol offers, by name, with the class of its parameters and where it is answered."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from sebp_edge.errors import JobError, StorageError
from sebp_edge.serve import messages
from sebp_edge.serve.messages import JOBS, Refusal, parse
from sebp_edge.serve.served_jobs import ACTIVE, ENDED
from sebp_edge.store.names import is_plain


def start_job(server, params: messages.StartJobParams) -> dict:
    """Starts a job, or returns the one that was started with this id."""
    if not is_plain(params.id):
        words = "has up to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
        raise Refusal("invalid_params", f"The id of a job {words}.")
    if params.kind not in JOBS:
        raise Refusal("invalid_params", f"There is no kind of job {params.kind[:40]!r}; choose from {', '.join(JOBS)}.")
    inner = parse(JOBS[params.kind], params.params, params.kind)
    check_paths(inner, server.folders)
    as_sent = asdict(params)
    if (job := server.jobs.started(params.id, as_sent)) is None:
        try:
            job = server.jobs.start(params, as_sent, *server.store.keep_job(params.id, inner))
        except StorageError:
            with suppress(JobError, StorageError):
                server.store.adapters.jobs.remove(params.id)
            raise
    return _shown(job)


def pause_job(server, params: messages.RunningJobParams) -> dict:
    """Pauses the running job: its state is saved, and the worker ends. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state not in ("running", "pausing") or job.stored is None:
        raise _wrong_state(job)
    if job.state == "running":
        server.executor.pause_job()
    return _shown(server.jobs.get(job.id))


def resume_job(server, params: messages.ResumeJobParams) -> dict:
    """Queues a job again whose state was saved, which goes on there."""
    job = server.jobs.get(params.id)
    if job.state in ("queued", "starting", "running"):
        return _shown(job)
    if not job.resumable or job.state not in ENDED | {"paused"}:
        raise _wrong_state(job)
    check_paths(params, server.folders)
    return _shown(server.jobs.resume(params))


def cancel_job(server, params: messages.RunningJobParams) -> dict:
    """Cancels a job. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state in ENDED and not job.resumable:
        raise _wrong_state(job)
    if job.state in ACTIVE:
        server.executor.cancel_job()
    else:
        server.jobs.cancel(job)
    return _shown(server.jobs.get(job.id))


def remove_job(server, params: messages.JobParams) -> dict:
    """Deletes all that is known of a job that is over or paused; what it has made stays."""
    job = server.jobs.get(params.id)
    if job.state not in ENDED | {"paused"}:
        raise _wrong_state(job)
    server.jobs.remove_stored(job)
    server.jobs.forget(job.id)
    return {}


def unload(server, params: messages.NoParams) -> dict:
    """Ends the worker, unless it runs a job."""
    if server.executor.running is not None:
        raise Refusal("busy", "A job is running.", "Pause or cancel it first.", retry=True)
    server.executor.end_worker("unloaded", "The worker was ended by unload.")
    return {}


def change_folders(server, params: messages.ChangeFoldersParams) -> dict:
    """Changes which folders the app may use, and returns all; what was asked for before goes on with those of then."""
    added, removed = ([real_path(each) for each in given] for given in (params.add, params.remove))
    if unknown := next((each for each in removed if each not in server.folders), None):
        message = f"{str(unknown)[:200]!r} is none of the folders that this app may use."
        raise Refusal("invalid_params", message, "Call folders without parameters to see them.")
    server.folders = [each for each in dict.fromkeys([*server.folders, *added]) if each not in removed]
    for each in (*server.planning, server.executor):
        each.settings = replace(each.settings, folders=tuple(map(str, server.folders)))
    return {"folders": [*map(str, server.folders)]}


def subscribe(server, params: messages.SubscribeParams) -> dict:
    """Sends the events of a job after a number, and those to come, as notifications `job.event`."""
    job = server.jobs.get(params.id)
    # A journal that could not be written has lost events at a restart: then its numbers begin below the app's.
    server.jobs.subscriptions[job.id] = params.since if params.since <= job.last_event else 0
    return _shown(job)


def unsubscribe(server, params: messages.JobParams) -> dict:
    """Sends no more events of a job."""
    server.jobs.subscriptions.pop(params.id, None)
    return {}


def _shown(job) -> dict:
    return {"job": asdict(job)}


def _wrong_state(job) -> Refusal:
    return Refusal("wrong_state", f"The job is {job.state}.", "jobs.get tells its state.", retry=job.state in ACTIVE)


def check_paths(params: object, folders: Sequence[Path]) -> None:
    """Refuses files and folders outside of those that the app may give."""
    paths = [*getattr(params, "paths", ()), *getattr(params, "folders", ())]
    paths += [getattr(params, key) for key in ("to", "file") if hasattr(params, key)]
    for path in paths:
        real_path(path)
    names = [*getattr(params, "documents", ()), getattr(params, "model", None), getattr(params, "recipe", None)]
    refuse_outside([*paths, *filter(None, names)], folders)
    adapter = getattr(params, "adapter", None)
    if adapter is not None and ("/" in adapter or "\\" in adapter):
        raise Refusal("invalid_params", "adapter is the name of an adapter in the store, not a folder.")


def real_path(path: str) -> Path:
    """Returns an absolute path without links; refuses another one, and what no file can be called."""
    with suppress(ValueError):
        if Path(path).is_absolute():
            return Path(os.path.realpath(path))
    raise Refusal("invalid_params", f"{path[:200]!r} is not an absolute path.")


def refuse_outside(paths: Iterable[str], folders: Sequence[Path]) -> None:
    """Refuses files and folders that lie, or link, outside of the allowed ones; names of other things are none."""
    for path in paths:
        is_path = Path(path).is_absolute() or os.path.lexists(path)
        if is_path and not any(real_path(path).is_relative_to(folder) for folder in folders):
            raise Refusal(
                "folder_not_allowed",
                f"{path[:200]!r} is outside of the folders that this app may use.",
                "Name the folder in `folders` of initialize, or add it with folders.",
            )


# What is answered at once, in the supervisor's loop, and what it calls.
HERE = {
    "ping": (messages.NoParams, lambda server, params: {}),
    "status": (messages.NoParams, lambda server, params: server.status()),
    "initialize": (messages.InitializeParams, lambda server, params: server.initialize(params)),
    "shutdown": (messages.NoParams, lambda server, params: server.end()),
    "unload": (messages.NoParams, unload),
    "folders": (messages.ChangeFoldersParams, change_folders),
    "cancel": (messages.CancelParams, lambda server, params: server.cancel(params.request)),
    "jobs.start": (messages.StartJobParams, start_job),
    "jobs.get": (messages.JobParams, lambda server, params: _shown(server.jobs.get(params.id))),
    "jobs.list": (messages.NoParams, lambda server, params: {"jobs": [*map(asdict, server.jobs.all())]}),
    "jobs.pause": (messages.RunningJobParams, pause_job),
    "jobs.resume": (messages.ResumeJobParams, resume_job),
    "jobs.cancel": (messages.RunningJobParams, cancel_job),
    "jobs.remove": (messages.JobParams, remove_job),
    "jobs.subscribe": (messages.SubscribeParams, subscribe),
    "jobs.unsubscribe": (messages.JobParams, unsubscribe),
}
# What is answered later: from the store, by a planner, or by the worker.
STORE = {
    "health": messages.NoParams,
    "adapters.list": messages.NoParams,
    "adapters.history": messages.AdapterParams,
    "adapters.activate": messages.VersionParams,
    "adapters.rollback": messages.AdapterParams,
    "adapters.rename": messages.RenameParams,
    "adapters.remove": messages.AdapterParams,
    "adapters.documents": messages.AdapterParams,
    "adapters.diff": messages.DiffParams,
    "adapters.export": messages.WriteArchiveParams,
    "adapters.import": messages.ReadArchiveParams,
    "adapters.gc": messages.GcParams,
    "report": messages.AdapterParams,
    "models": messages.FoldersParams,
    "recipes": messages.NoParams,
}
PLANNER = {"inspect": messages.TextsParams, "plan": messages.PlanParams}
# What a planner answers too, but a worker that is there answers sooner: it has read the texts before.
SEARCH = {"ask": messages.AskParams, "search": messages.SearchParams}
WORKER = {"generate": messages.GenerateParams, "complete": messages.CompleteParams}
# The class of the parameters of each method.
METHODS = {name: params for name, (params, _) in HERE.items()} | STORE | PLANNER | SEARCH | WORKER
# What may be asked before `initialize`.
FIRST = frozenset({"ping", "status", "initialize", "shutdown"})
