"""A client in Python: starts a server, and speaks with it.

async with await Client.start(folders=["/home/me/notes"]) as client:
    await client.call("jobs.start", id="first", params={"paths": ["/home/me/notes"], "name": "notes"})
    async for event in client.events("first"):
        print(event["progress"], event["event"]["event"])
    print(await client.call("generate", prompt="Dear Ada,", adapter="notes"))
"""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from sebp_edge.serve.ends import command_of
from sebp_edge.serve.jobs import ENDED
from sebp_edge.serve.messages import PROTOCOL

__all__ = ["Client", "ServerError"]

_MAX_LINE = 2**27
_SECONDS_TO_END = 3


class ServerError(Exception):
    """The server refused a request.

    Attributes:
        code: stable, such as "busy".
        hint: what to do.
        retry: whether the same request may succeed later.
        data: all that the server says of it.
    """

    def __init__(self, message: str, data: dict):
        super().__init__(message)
        self.data = data
        self.code, self.hint, self.retry = data.get("code", ""), data.get("hint", ""), data.get("retry", False)


@dataclass
class _Request:
    answer: asyncio.Future
    on_text: Callable[[str], None] | None
    # Called before the next message is read.
    on_result: Callable[[], None] | None


class Client:
    """A running server.

    Attributes:
        process: the server.
    """

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._events: dict[str, asyncio.Queue] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: tuple[str, ...] = (), **settings) -> "Client":
        """Starts a server.

        Args:
            command: the server's; by default that of this installation.
            settings: those of `initialize`, such as `folders`, `store` and `memory_budget`.

        Raises:
            ServerError: it refuses the settings, for example because another server has the store.
        """
        process = await asyncio.create_subprocess_exec(
            *(command or command_of("serves", "__main__")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
        )
        client = cls(process)
        try:
            await client.call("initialize", **{"protocol": PROTOCOL, "parent": {"pid": os.getpid()}} | settings)
        except BaseException:
            await client.close()
            raise
        return client

    async def call(self, method: str, *, on_text: Callable[[str], None] | None = None, **params) -> dict:
        """Returns the result of a method. If the task that waits for it is cancelled, so is the request.

        Args:
            on_text: receives the text of `generate`, `complete` and `ask` in chunks.

        Raises:
            ServerError: the server refused it, or ended.
        """
        return await self._call(method, params, on_text)

    async def events(self, job: str, since: int = 0) -> AsyncIterator[dict]:
        """Yields the events of a job after a number, up to the one with which it is paused or has ended.

        Raises:
            ServerError: there is no such job, the server has ended, or another iteration has begun to follow this job.
        """
        queue = asyncio.Queue()

        def begin() -> None:
            # Events before the answer are an earlier subscription's.
            if job in self._events:
                self._events[job].put_nowait(_superseded())
            self._events[job] = queue

        try:
            await self._call("jobs.subscribe", {"id": job, "since": since}, on_result=begin)
            while not isinstance(event := await queue.get(), ServerError):
                yield event
                if event["event"].get("state") in ENDED | {"paused"}:
                    return
            raise event
        finally:
            if self._events.get(job) is queue:  # else another iteration has taken its place
                del self._events[job]

    async def close(self) -> None:
        """Ends the server: it saves the state of a running job first."""
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _SECONDS_TO_END)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self._reading

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def _call(self, method: str, params: dict, on_text=None, on_result=None) -> dict:
        if self._reading.done():
            raise _ended()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._requests[number] = _Request(answer, on_text, on_result)
        try:
            await self._send(number, method, params)
            return await answer
        except asyncio.CancelledError:
            with suppress(ServerError):
                await self._send(next(self._numbers), "cancel", {"request": number})
            raise
        finally:
            del self._requests[number]

    async def _send(self, number: int, method: str, params: dict) -> None:
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise _ended() from None

    async def _read(self) -> None:
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            params = message.get("params", {})
            match message.get("method"):
                case "text":
                    request = self._requests.get(params["request"])
                    if request is not None and request.on_text is not None:
                        request.on_text(params["text"])
                case "job.event":
                    if params["job"] in self._events:
                        self._events[params["job"]].put_nowait(params)
                case None:
                    self._answer(message)
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_exception(_ended())
        for queue in self._events.values():
            queue.put_nowait(_ended())

    def _answer(self, message: dict) -> None:
        request = self._requests.get(message["id"])
        if request is None or request.answer.done():
            return
        if "error" in message:
            request.answer.set_exception(ServerError(message["error"]["message"], message["error"]["data"]))
            return
        if request.on_result is not None:
            request.on_result()
        request.answer.set_result(message["result"])


def _superseded() -> ServerError:
    data = {"code": "superseded", "hint": "Follow each job in one place.", "retry": False}
    return ServerError("Another iteration follows the events of this job now.", data)


def _ended() -> ServerError:
    return ServerError("The server has ended.", {"code": "server_ended", "hint": "Start another one.", "retry": True})
