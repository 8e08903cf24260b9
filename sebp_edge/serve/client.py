"""A client in Python: starts a server, and speaks with it.

async with await Client.start(folders=["/home/me/notes"]) as client:
    await client.call("jobs.start", id="first", params={"paths": ["/home/me/notes"], "name": "notes"})
    async for event in client.events("first"):
        print(event["progress"], event["event"]["event"])
    print(await client.call("generate", prompt="Dear Ada,", adapter="notes"))
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from sebp_edge.serve.messages import PROTOCOL
from sebp_edge.serve.parent_process import command_of
from sebp_edge.serve.served_jobs import ENDED
from sebp_edge.serve.streams import MAX_LINE

__all__ = ["Client", "ServerError"]

# A server that writes a longer line is broken, and is killed.
_MAX_ANSWER = 2**27
_LAST_STATES = ENDED | {"paused"}
_ERRORS = {
    "server_ended": ("The server has ended.", "Start another one.", True),
    "bad_message": ("The server wrote a line that is no message; an answer may be lost.", "Ask again.", True),
}
_SECONDS_TO_END = 3


class ServerError(Exception):
    """The server refused a request, could not answer it, or cannot start.

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
    answer: asyncio.Future[dict | BaseException]
    on_text: Callable[[str], None] | None
    # Called before the next message is read.
    on_result: Callable[[], None] | None

    def end(self, answer: dict | BaseException) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Client:
    """A running server.

    Attributes:
        process: the server.
    """

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self._number = 0  # of the last request
        self._requests: dict[int, _Request] = {}
        # For each job, the number of the last event that each iteration has seen.
        self._events: dict[str, dict[asyncio.Queue, int]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: tuple[str, ...] = (), **settings) -> "Client":
        """Starts a server.

        Args:
            command: the server's; by default that of this installation.
            settings: those of `initialize`, such as `folders`, `store` and `memory_budget`.

        Raises:
            ServerError: it cannot start, or refuses the settings, for example because another server has the store.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(command or command_of("serves", "__main__")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_ANSWER,
            )
        except OSError as error:
            why = f"The server cannot start: {error.strerror}."
            raise _error("cannot_start", why, "Check the command, and whether sebp-edge is installed.") from error
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
            on_text: receives the text of `generate`, `complete` and `ask` in chunks. An error that it raises ends the
                request, and is raised here.

        Raises:
            ServerError: the server refused it, or ended; or it cannot be sent.
        """
        return await self.request(method, params, on_text)

    async def events(self, job: str, since: int = 0) -> AsyncIterator[dict]:
        """Yields the events of a job after a number, up to the one with which it is paused or has ended.

        Raises:
            ServerError: there is no such job, or the server has ended.
        """
        queue, followers = asyncio.Queue(), self._events.setdefault(job, {})
        followers[queue] = since

        def begin() -> None:
            while not queue.empty():  # of an earlier subscription
                queue.get_nowait()

        try:
            # It takes the place of an earlier one: what any iteration has not seen is sent again.
            asked = {"id": job, "since": min(followers.values())}
            found = (await self.request("jobs.subscribe", asked, on_result=begin)).get("job", {})
            # Of a job that was resumed, the states of before are sent, too.
            last, is_over = found.get("last_event", 0), found.get("state") in _LAST_STATES
            since = since if since <= last else 0
            while not (is_over and since == last):
                if isinstance(event := await queue.get(), ServerError):
                    raise event
                if event["number"] > since:
                    yield event
                    followers[queue] = since = event["number"]
                    is_over, last = event["event"].get("state") in _LAST_STATES, max(last, since)
        finally:
            del followers[queue]
            if not followers:
                self._events.pop(job, None)

    async def close(self) -> None:
        """Ends the server: it saves the state of a running job first."""
        self.process.stdin.close()
        ended = asyncio.create_task(self.process.wait())
        await asyncio.wait({ended}, timeout=_SECONDS_TO_END)
        if not ended.done():
            self._kill()
            # Not for ever: a process that it has started may hold its output.
            await asyncio.wait({ended}, timeout=_SECONDS_TO_END)
            for task in (ended, self._reading):
                task.cancel()
        await asyncio.wait({self._reading})

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def request(self, method: str, params: dict, on_text=None, on_result=None) -> dict:
        """Returns the result of a method whose parameters may have any names; see `call`."""
        if self._reading.done():
            raise _error("server_ended")
        number, line = self._numbered(method, params)
        request = self._requests[number] = _Request(asyncio.get_running_loop().create_future(), on_text, on_result)
        self.process.stdin.write(line)
        # Beside the wait for the answer: a server that is broken may never read it.
        sending = asyncio.create_task(self._drain(request))
        try:
            if isinstance(found := await request.answer, BaseException):
                raise found
            return found
        except ServerError:
            raise
        except BaseException:  # the task is cancelled, or on_text has failed
            self.process.stdin.write(self._numbered("cancel", {"request": number})[1])
            raise
        finally:
            sending.cancel()
            del self._requests[number]

    def _numbered(self, method: str, params: dict) -> tuple[int, bytes]:
        request = {"jsonrpc": "2.0", "id": self._number + 1, "method": method, "params": params}
        try:
            line = json.dumps(request, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _error("invalid_params", f"The parameters are no JSON: {error}.", "Give other values.") from error
        if len(line) > MAX_LINE:
            raise _error("too_long", f"The request has more than {MAX_LINE // 2**20} MiB.", "Give texts as files.")
        self._number += 1
        return self._number, line + b"\n"

    async def _drain(self, request: _Request) -> None:
        try:
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):
            request.end(_error("server_ended"))

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _read(self) -> None:
        try:
            while (line := await self.process.stdout.readline()).endswith(b"\n"):
                try:
                    self._take(json.loads(line))
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    # It may have been any answer, or the last event.
                    self._fail(_error("bad_message"), self._events.values())
        except ValueError:  # the line is too long
            self._kill()
        finally:
            self._fail(_error("server_ended"), self._events.values())

    def _fail(self, error: ServerError, events: Iterable[Iterable[asyncio.Queue]] = ()) -> None:
        for request in self._requests.values():
            request.end(error)
        for queue in chain.from_iterable(events):
            queue.put_nowait(error)

    def _take(self, message: dict) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "text":
                request = self._requests.get(params["request"])
                if request is not None and request.on_text is not None and not request.answer.done():
                    text = params["text"]
                    try:
                        request.on_text(text)
                    except BaseException as error:
                        request.end(error)
            case "job.event":
                for queue in self._events.get(params["job"], ()):
                    queue.put_nowait(params)
            case None:
                self._answer(message)

    def _answer(self, message: dict) -> None:
        number, error = message["id"], message.get("error")
        answer = message["result"] if error is None else ServerError(error["message"], error.get("data") or {})
        if number is None and error is not None:  # it could not read a request, and does not know which
            self._fail(answer)
        elif not 0 < number <= self._number:
            raise ValueError("no request had this number")
        elif request := self._requests.get(number):
            if request.on_result is not None and not isinstance(answer, ServerError):
                request.on_result()
            request.end(answer)


def _error(code: str, message: str = "", hint: str = "") -> ServerError:
    message, hint, retry = _ERRORS.get(code, (message, hint, False))
    return ServerError(message, {"code": code, "hint": hint, "retry": retry})
