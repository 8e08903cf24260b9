"""The protocol's own methods over HTTP, one request of JSON-RPC in each; texts and events as server-sent events."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from sebp_edge.serve.client import Client, ServerError
from sebp_edge.serve.http.streaming import EventStream, body_of, described, texts_and_result, to_json, unless_gone
from sebp_edge.serve.messages import Refusal, SubscribeParams, parse, read
from sebp_edge.serve.methods import SEARCH, WORKER
from sebp_edge.serve.streams import LongLine


class Rpc:
    """Answers requests through a client of the server, and sends each app the events of the jobs that it follows."""

    def __init__(self, client: Client):
        self._client = client

    async def answer(self, request: Request) -> Response:
        """Answers a request: with a stream for `jobs.subscribe`, and for a text if the app accepts that."""
        id = None

        def failed(error: Exception) -> dict:
            return _message(id=id, error=described(error))

        try:
            message = read(await body_of(request))
            id, name, params = message["id"], message["method"], message.get("params", {})
            if name in ("initialize", "cancel", "jobs.unsubscribe"):
                raise Refusal("unknown_method", f"There is no {name!r} over HTTP.", "Close a request to end it.")
            if name == "folders":
                raise Refusal("forbidden", "Only the app that started this server changes folders, on its input.")
            if not isinstance(params, dict):
                raise Refusal("invalid_params", f"The params of {name!r} are not a JSON object.")
            if name == "jobs.subscribe":
                asked = parse(SubscribeParams, params, name)
                found = await self._client.call("jobs.get", id=asked.id)
                return EventStream(self._events(id, found, asked.since), failed)
            if name in (WORKER | SEARCH) and "text/event-stream" in request.headers.get("accept", ""):
                return EventStream(self._texts(id, name, params), failed)
            result = await unless_gone(request, self._client.request(name, params))
            return to_json(_message(id=id, result=result))
        except (Refusal, ServerError) as error:
            return to_json(failed(error))

    async def answer_starter(self, line: bytes | type[LongLine]) -> dict:
        """Answers a line of the app that started this server, which alone may change folders."""
        id = None
        try:
            message = read(b"" if line is LongLine else line)
            id = message["id"]
            if message["method"] != "folders":
                raise Refusal("unknown_method", "On the standard input there is folders only.", "POST others to /rpc.")
            return _message(id=id, result=await self._client.request("folders", message.get("params", {})))
        except Exception as error:
            return _message(id=id, error=described(error))

    async def _texts(self, id: str | int, name: str, params: dict) -> AsyncIterator[dict]:
        async with aclosing(texts_and_result(self._client, name, params)) as found:
            async for each in found:
                if isinstance(each, str):
                    yield _message(method="text", params={"request": id, "text": each})
                else:
                    yield _message(id=id, result=each)

    async def _events(self, id: str | int, found: dict, since: int) -> AsyncIterator[dict]:
        """Yields what is known of a job, and its events after a number."""
        yield _message(id=id, result=found)
        async with aclosing(self._client.events(found["job"]["id"], since)) as events:
            async for event in events:
                yield _message(method="job.event", params=event)


def _message(**values) -> dict:
    return {"jsonrpc": "2.0", **values}
