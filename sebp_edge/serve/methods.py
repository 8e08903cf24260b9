"""What the protocol offers, by name. A method returns its result, or None if it is answered later."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from sebp_edge.serve import messages
from sebp_edge.serve.jobs import ACTIVE, ENDED
from sebp_edge.serve.messages import JOBS, Cancel, OneJob, Refusal, ResumeJob, RunningJob, StartJob, Subscribe, parse


class Method(NamedTuple):
    """A method of the protocol.

    Attributes:
        params: the class of its parameters.
        where: "here" in the supervisor's loop, on the "shelf", or in the "worker".
        call: what it calls here; the others have it under the method's name.
    """

    params: type
    where: str
    call: Callable | None = None


def start_job(server, params: StartJob) -> dict:
    """Starts a job, or returns the one that was started with this id."""
    if not messages.JOB_ID.fullmatch(params.id):
        raise Refusal("invalid_params", "The id of a job has up to 64 letters, digits, dots, dashes and underscores.")
    if params.kind not in JOBS:
        raise Refusal("invalid_params", f"There is no kind of job {params.kind[:40]!r}; choose from {', '.join(JOBS)}.")
    inner = parse(JOBS[params.kind], params.params, params.kind)
    check_paths(inner, server.folders)
    return {"job": asdict(server.jobs.start(params, inner.name, asdict(params)))}


def get_job(server, params: OneJob) -> dict:
    """Returns a job."""
    return {"job": asdict(server.jobs.get(params.id))}


def list_jobs(server, params) -> dict:
    """Returns all jobs, oldest first."""
    return {"jobs": [asdict(job) for job in server.jobs.all()]}


def pause_job(server, params: RunningJob) -> dict:
    """Pauses the running job: its state is saved, and the worker ends. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state not in ("running", "pausing") or job.kind == "export":
        raise _wrong_state(job)
    if job.state == "running":
        server.pause(job.id)
    return get_job(server, OneJob(id=job.id))


def resume_job(server, params: ResumeJob) -> dict:
    """Queues a paused or interrupted job again, which goes on where it was saved."""
    job = server.jobs.get(params.id)
    if job.state in ("queued", "starting", "running"):
        return {"job": asdict(job)}
    if job.state not in ("paused", "interrupted") or not job.resumable:
        raise _wrong_state(job)
    check_paths(params, server.folders)
    return {"job": asdict(server.jobs.resume(params))}


def cancel_job(server, params: RunningJob) -> dict:
    """Cancels a job. Returns at once; the state is an event."""
    job = server.jobs.get(params.expected_job_id)
    if job.state in ENDED and not job.resumable:
        raise _wrong_state(job)
    server.cancel(job)
    return get_job(server, OneJob(id=job.id))


def subscribe(server, params: Subscribe) -> dict:
    """Sends the events of a job after a number, and those to come, as notifications `job.event`."""
    job = server.jobs.get(params.id)
    server.subscriptions[job.id] = params.since
    return {"job": asdict(job)}


def cancel(server, params: Cancel) -> dict:
    """Cancels a request that is not answered yet; that is answered with the code "cancelled"."""
    server.cancel_request(params.request)
    return {}


def _wrong_state(job) -> Refusal:
    return Refusal("wrong_state", f"The job is {job.state}.", "jobs.get tells its state.", retry=job.state in ACTIVE)


def check_paths(params: object, folders: list[Path]) -> None:
    """Refuses files and folders outside of those that the app may give.

    Raises:
        Refusal: a path is not absolute, or is outside.
    """
    paths = [*getattr(params, "paths", ()), *getattr(params, "folders", ())]
    if getattr(params, "to", None) is not None:
        paths.append(params.to)
    # These may be names, too.
    named = [*getattr(params, "documents", ()), getattr(params, "model", None), getattr(params, "recipe", None)]
    paths += [name for name in named if name and (Path(name).is_absolute() or os.path.lexists(name))]
    for path in paths:
        if not Path(path).is_absolute() or "\0" in path:
            raise Refusal("invalid_params", f"{path[:200]!r} is not an absolute path.")
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(folder) for folder in folders):
            raise Refusal(
                "folder_not_allowed",
                f"{path[:200]!r} is outside of the folders that this app may use.",
                "Name the folder in `folders` of initialize.",
            )
    adapter = getattr(params, "adapter", None)
    if adapter is not None and ("/" in adapter or "\\" in adapter):
        raise Refusal("invalid_params", "adapter is the name of an adapter in the store, not a folder.")


METHODS = {
    "ping": Method(messages.Nothing, "here", lambda server, params: {}),
    "status": Method(messages.Nothing, "here", lambda server, params: server.status()),
    "initialize": Method(messages.Initialize, "here", lambda server, params: server.initialize(params)),
    "shutdown": Method(messages.Nothing, "here", lambda server, params: server.end("shutdown")),
    "unload": Method(messages.Nothing, "here", lambda server, params: server.unload()),
    "cancel": Method(Cancel, "here", cancel),
    "jobs.start": Method(StartJob, "here", start_job),
    "jobs.get": Method(OneJob, "here", get_job),
    "jobs.list": Method(messages.Nothing, "here", list_jobs),
    "jobs.pause": Method(RunningJob, "here", pause_job),
    "jobs.resume": Method(ResumeJob, "here", resume_job),
    "jobs.cancel": Method(RunningJob, "here", cancel_job),
    "jobs.subscribe": Method(Subscribe, "here", subscribe),
    "adapters.list": Method(messages.Nothing, "shelf"),
    "adapters.history": Method(messages.OneAdapter, "shelf"),
    "adapters.activate": Method(messages.OneVersion, "shelf"),
    "adapters.rollback": Method(messages.OneAdapter, "shelf"),
    "adapters.rename": Method(messages.Rename, "shelf"),
    "adapters.remove": Method(messages.OneAdapter, "shelf"),
    "adapters.documents": Method(messages.OneAdapter, "shelf"),
    "report": Method(messages.OneAdapter, "shelf"),
    "models": Method(messages.Folders, "shelf"),
    "inspect": Method(messages.Texts, "worker"),
    "plan": Method(messages.Plan, "worker"),
    "ask": Method(messages.Ask, "worker"),
    "generate": Method(messages.Generate, "worker"),
    "complete": Method(messages.Complete, "worker"),
}
# What may be asked before `initialize`.
FIRST = frozenset({"ping", "status", "initialize", "shutdown"})
