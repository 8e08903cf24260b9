"""What the protocol offers, by name. A method returns its result, or None if it is answered later."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from sebp_edge.errors import StorageError
from sebp_edge.serve import messages
from sebp_edge.serve.messages import (
    JOBS,
    CancelParams,
    JobParams,
    Refusal,
    ResumeJobParams,
    RunningJobParams,
    StartJobParams,
    SubscribeParams,
    parse,
)
from sebp_edge.serve.served_jobs import ACTIVE, ENDED
from sebp_edge.store.names import is_plain


class Method(NamedTuple):
    """A method of the protocol.

    Attributes:
        params: the class of its parameters.
        where: "here" in the supervisor's loop, about the "store", in a "planner", or in the "worker".
        call: what it calls here; the others have it under the method's name.
    """

    params: type
    where: str
    call: Callable | None = None


def start_job(server, params: StartJobParams) -> dict:
    """Starts a job, or returns the one that was started with this id."""
    if not is_plain(params.id):
        words = "has up to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
        raise Refusal("invalid_params", f"The id of a job {words}.")
    if params.kind not in JOBS:
        raise Refusal("invalid_params", f"There is no kind of job {params.kind[:40]!r}; choose from {', '.join(JOBS)}.")
    inner = parse(JOBS[params.kind], params.params, params.kind)
    check_paths(inner, server.folders)
    try:
        return {"job": asdict(server.jobs.start(params, asdict(params), lambda: server.keep(params, inner)))}
    except StorageError:
        server.forget_kept(params.id)
        raise


def get_job(server, params: JobParams) -> dict:
    """Returns a job."""
    return {"job": asdict(server.jobs.get(params.id))}


def pause_job(server, params: RunningJobParams) -> dict:
    """Pauses the running job: its state is saved, and the worker ends. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state not in ("running", "pausing") or job.kind == "export":
        raise _wrong_state(job)
    if job.state == "running":
        server.pause(job.id)
    return get_job(server, JobParams(id=job.id))


def resume_job(server, params: ResumeJobParams) -> dict:
    """Queues a job again whose state was saved, which goes on there."""
    job = server.jobs.get(params.id)
    if job.state in ("queued", "starting", "running"):
        return {"job": asdict(job)}
    if not job.resumable or job.state not in ENDED | {"paused"}:
        raise _wrong_state(job)
    check_paths(params, server.folders)
    return {"job": asdict(server.jobs.resume(params))}


def cancel_job(server, params: RunningJobParams) -> dict:
    """Cancels a job. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state in ENDED and not job.resumable:
        raise _wrong_state(job)
    server.cancel(job)
    return get_job(server, JobParams(id=job.id))


def subscribe(server, params: SubscribeParams) -> dict:
    """Sends the events of a job after a number, and those to come, as notifications `job.event`."""
    job = server.jobs.get(params.id)
    # A journal that could not be written has lost events at a restart: then its numbers begin below the app's.
    server.jobs.subscriptions[job.id] = params.since if params.since <= job.last_event else 0
    return {"job": asdict(job)}


def _wrong_state(job) -> Refusal:
    return Refusal("wrong_state", f"The job is {job.state}.", "jobs.get tells its state.", retry=job.state in ACTIVE)


def check_paths(params: object, folders: Sequence[Path]) -> None:
    """Refuses files and folders outside of those that the app may give.

    Raises:
        Refusal: a path is not absolute, or is outside.
    """
    paths = [*getattr(params, "paths", ()), *getattr(params, "folders", ())]
    if getattr(params, "to", None) is not None:
        paths.append(params.to)
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
                "Name the folder in `folders` of initialize.",
            )


METHODS = {
    "ping": Method(messages.NoParams, "here", lambda server, params: {}),
    "status": Method(messages.NoParams, "here", lambda server, params: server.status()),
    "initialize": Method(messages.InitializeParams, "here", lambda server, params: server.initialize(params)),
    "shutdown": Method(messages.NoParams, "here", lambda server, params: server.end()),
    "unload": Method(messages.NoParams, "here", lambda server, params: server.unload()),
    "cancel": Method(CancelParams, "here", lambda server, params: server.cancel_request(params.request)),
    "jobs.start": Method(StartJobParams, "here", start_job),
    "jobs.get": Method(JobParams, "here", get_job),
    "jobs.list": Method(messages.NoParams, "here", lambda server, params: {"jobs": [*map(asdict, server.jobs.all())]}),
    "jobs.pause": Method(RunningJobParams, "here", pause_job),
    "jobs.resume": Method(ResumeJobParams, "here", resume_job),
    "jobs.cancel": Method(RunningJobParams, "here", cancel_job),
    "jobs.subscribe": Method(SubscribeParams, "here", subscribe),
    "adapters.list": Method(messages.NoParams, "store"),
    "adapters.history": Method(messages.AdapterParams, "store"),
    "adapters.activate": Method(messages.VersionParams, "store"),
    "adapters.rollback": Method(messages.AdapterParams, "store"),
    "adapters.rename": Method(messages.RenameParams, "store"),
    "adapters.remove": Method(messages.AdapterParams, "store"),
    "adapters.documents": Method(messages.AdapterParams, "store"),
    "report": Method(messages.AdapterParams, "store"),
    "models": Method(messages.FoldersParams, "store"),
    "inspect": Method(messages.TextsParams, "planner"),
    "plan": Method(messages.PlanParams, "planner"),
    "ask": Method(messages.AskParams, "worker"),
    "generate": Method(messages.GenerateParams, "worker"),
    "complete": Method(messages.CompleteParams, "worker"),
}
# What may be asked before `initialize`.
FIRST = frozenset({"ping", "status", "initialize", "shutdown"})
