"""The protocol in a thread of its own: the window calls methods, and hears by Qt's signals in its own thread."""

import asyncio
import threading
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, Qt, Signal

from sebp_edge import SebpEdgeError
from sebp_edge.serve.client import Client, ServerError
from sebp_edge.serve.http.door import open_endpoint

NAME = "notes"  # of the one adapter that this window has
_ENDED = {"done", "refused", "interrupted", "failed"}


@dataclass
class Settings:
    """What the owner has chosen.

    Attributes:
        store: the folder of the versions.
        save: called after a change of what follows; it keeps them for the next start.
        folders: those with notes; the server reads no others.
        model: the base model.
        budget: the memory that it may use, such as "8GB"; None for what is free.
    """

    store: str
    save: Callable[["Settings"], None] = lambda settings: None
    folders: list[str] = field(default_factory=list)
    model: str = "tiny"
    budget: str | None = None


class Request:
    """A request that is not answered yet. Once it is cancelled, nothing is heard of it any more."""

    def __init__(self):
        self.is_cancelled, self.future = False, None

    def cancel(self) -> None:
        self.is_cancelled = True
        self.future.cancel()


class Backend(QObject):
    """A server, what it does, and what it has saved. All methods return at once; all signals are in Qt's main thread.

    Signals:
        state_changed: the server starts, is ready, or is lost.
        job_changed: the last job changed, or made progress.
        versions_changed: another version is in use, or versions were added or removed.

    Attributes:
        settings: change them with `change`.
        state: "starting", "ready", "lost" or "closed".
        trouble: why the server is lost.
        job: the last job as in `jobs.get`; None if there is none to show.
        versions: the records of all versions, oldest first.
        endpoint: the address and the token for other apps on this computer; empty without a server.
    """

    state_changed = Signal()
    job_changed = Signal()
    versions_changed = Signal()
    _said = Signal(object)

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings, self.state = settings, "starting"
        self.trouble: dict | None = None
        self.job: dict | None = None
        self.versions: list[dict] = []
        self.endpoint = ("", "")
        self._endpoint, self._port = AsyncExitStack(), 0
        self._is_cancelling = False
        self._client: Client | None = None
        self._said.connect(self._hear, Qt.ConnectionType.QueuedConnection)
        self._runner = asyncio.Runner()
        self._loop, self._starting, self._end = self._runner.get_loop(), asyncio.Lock(), asyncio.Event()
        # Lives as long as the server, which the kernel wakes when the thread that started it ends.
        self._thread = threading.Thread(target=self._serve, name="protocol")
        self._thread.start()
        self.restart()

    @property
    def is_learning(self) -> bool:
        """Whether a job runs or waits."""
        return self.job is not None and self.job["state"] not in _ENDED | {"paused"}

    @property
    def source(self) -> dict:
        """The parameters that say which notes, and which model."""
        return {"paths": self.settings.folders, "model": self.settings.model}

    @property
    def active(self) -> dict | None:
        """The record of the version in use; None if there is none."""
        return next((version for version in self.versions if version["active"]), None)

    @property
    def learnt(self) -> dict:
        """The parameters that say which model answers: that of the version in use, if there is one."""
        if self.active is None:
            return {"model": self.settings.model}
        return {"model": self.active["model"], "adapter": NAME}

    def call(
        self,
        method: str,
        done: Callable[[dict], None],
        failed: Callable[[ServerError], None],
        on_text: Callable[[str], None] | None = None,
        **params,
    ) -> Request:
        """Calls a method of the protocol; one of `done` and `failed` is called later, unless it is cancelled."""
        request = Request()

        def tell(function: Callable, value) -> None:
            self._said.emit(lambda: request.is_cancelled or function(value))

        async def run() -> None:
            try:
                async with self._starting:
                    client = self._client
                if client is None:
                    raise ServerError("", {"code": "server_ended"})
                on_chunk = None if on_text is None else lambda text: tell(on_text, text)
                tell(done, await client.call(method, on_text=on_chunk, **params))
            except ServerError as error:
                tell(failed, error)

        request.future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return request

    def change(self, **settings) -> None:
        """Changes settings, and keeps them at once: the window may be killed."""
        self.settings = replace(self.settings, **settings)
        self.settings.save(self.settings)

    def restart(self) -> None:
        """Starts a server with the settings as they are now, and ends the one before."""
        self._set_state("starting")
        asyncio.run_coroutine_threadsafe(self._start(replace(self.settings)), self._loop)

    def learn(self, failed: Callable[[ServerError], None]) -> None:
        """Learns the notes."""
        id, params = uuid.uuid4().hex, {**self.source, "name": NAME}
        self.call("jobs.start", lambda found: self._follow(found["job"]), failed, id=id, params=params)

    def resume(self, failed: Callable[[ServerError], None], changed: str = "without") -> None:
        """Goes on with the paused or interrupted job."""
        self.call("jobs.resume", lambda found: self._follow(found["job"]), failed, id=self.job["id"], changed=changed)

    def pause(self, failed: Callable[[ServerError], None]) -> None:
        """Pauses the running job."""
        self.call("jobs.pause", lambda found: None, failed, expected_job_id=self.job["id"])

    def cancel(self, failed: Callable[[ServerError], None]) -> None:
        """Cancels the job, or drops what was saved of one that is paused."""
        self._is_cancelling = self.is_learning
        done = (lambda found: None) if self.is_learning else (lambda found: self._show_job(None))
        self.call("jobs.cancel", done, failed, expected_job_id=self.job["id"])

    def look_at_versions(self) -> None:
        """Asks which versions there are."""
        nothing = {"versions": []}  # there is no adapter yet
        self.call("adapters.history", self._set_versions, lambda error: self._set_versions(nothing), name=NAME)

    def close(self) -> None:
        """Ends the server and all its processes: within two seconds, or by force."""
        self.state = "closed"
        self._said.disconnect(self._hear)
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    # ------------------------------------------------------------------------------------------ in the window's thread

    def _hear(self, function: Callable[[], None]) -> None:
        function()

    def _set_state(self, state: str, trouble: dict | None = None) -> None:
        self.state, self.trouble = state, trouble
        if state == "lost" and self.is_learning:
            self._show_job({**self.job, "state": "interrupted", "resumable": True, "error": trouble})
        self.state_changed.emit()

    def _show_job(self, job: dict | None) -> None:
        self.job = job
        self.job_changed.emit()

    def _set_versions(self, found: dict) -> None:
        self.versions = found["versions"]
        self.versions_changed.emit()

    def _follow(self, job: dict) -> None:
        self._is_cancelling = False
        self._show_job({**job, "state": "queued"})
        asyncio.run_coroutine_threadsafe(self._tell_events(job["id"], job["last_event"]), self._loop)

    def _take(self, id: str, event: dict) -> None:
        if self.job is None or self.job["id"] != id:
            return
        job = self.job | {key: event[key] for key in ("phase", "progress", "seconds_left")}
        job["last_event"] = event["number"]
        if event["event"]["event"] == "state":
            job |= {key: event["event"].get(key) for key in ("state", "resumable", "error", "result")}
            if job["state"] in _ENDED:
                self.look_at_versions()
        self._show_job(job)
        if self._is_cancelling and job["resumable"]:
            self.cancel(lambda error: None)  # drops what was saved to go on with

    # ---------------------------------------------------------------------------------------- in the protocol's thread

    def _tell(self, function: Callable, *values) -> None:
        self._said.emit(lambda: function(*values))

    def _serve(self) -> None:
        with self._runner:
            self._runner.run(self._until_the_end())

    async def _until_the_end(self) -> None:
        await self._end.wait()
        async with self._starting:
            await self._end_client()

    async def _end_client(self) -> None:
        client, self._client, self.endpoint = self._client, None, ("", "")
        if client is not None:
            await client.close()
        await self._endpoint.aclose()

    async def _start(self, settings: Settings) -> None:
        async with self._starting:
            await self._end_client()
            if self._end.is_set():
                return
            try:
                choices = {"store": settings.store, "folders": settings.folders, "memory_budget": settings.budget}
                client = await Client.start(**choices)
                self._client = client
                jobs = (await client.call("jobs.list"))["jobs"]
                endpoint = open_endpoint(client, Path(settings.store), settings.model, self._port)
                address, token = await self._endpoint.enter_async_context(endpoint)
                self.endpoint, self._port = (address, token.read_text()), urlsplit(address).port
            except (ServerError, SebpEdgeError) as error:
                self._tell(self._set_state, "lost", {"code": error.code, "message": str(error)})
                return
        unfinished = [job for job in jobs if job["resumable"]]
        self._tell(self._show_job, unfinished[-1] if unfinished else None)
        self._tell(self._set_state, "ready")
        self._tell(self.look_at_versions)
        await client.process.wait()
        if client is self._client:
            self._client = None
            self._tell(self._set_state, "lost", {"code": "server_ended"})

    async def _tell_events(self, id: str, since: int) -> None:
        with suppress(ServerError, AttributeError):  # without a server, `_set_state` says so
            async for event in self._client.events(id, since):
                self._tell(self._take, id, event)
