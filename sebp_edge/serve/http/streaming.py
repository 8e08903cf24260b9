"""Reads bodies of bounded size, writes JSON and streams of events, and notices apps that disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sebp_edge.serve.client import Client, ServerError
from sebp_edge.serve.messages import Refusal, cancelled, error_of
from sebp_edge.serve.streams import MAX_LINE


async def body_of(request: Request) -> bytes:
    """Returns a request's body. One that is too long is read to its end, too, so that the app reads the refusal."""
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        body += part if size <= MAX_LINE else b""
    if size > MAX_LINE:
        raise Refusal("too_long", f"The request has more than {MAX_LINE // 2**20} MiB.", "Give texts as files.")
    return bytes(body)


def described(error: Exception) -> dict:
    """Returns an error as JSON-RPC has it."""
    if isinstance(error, ServerError):
        return Refusal(error.code, str(error)).to_dict() | {"data": error.data}
    return error_of(error)


def to_json(values: dict, status: int = 200) -> Response:
    """Returns an answer. Only ASCII, since file names may not be valid text."""
    return Response(json.dumps(values), status, media_type="application/json")


class EventStream(StreamingResponse):
    """Messages as server-sent events. Closes the iterator of messages when the app disconnects.

    Args:
        failed: makes the last message of an error.
    """

    def __init__(self, messages: AsyncIterator[dict | str], failed: Callable[[Exception], dict]):
        super().__init__(self._events(messages, failed), headers={"Cache-Control": "no-store"})
        self.headers["Content-Type"] = "text/event-stream"

    async def stream_response(self, send) -> None:
        """See `StreamingResponse`."""
        async with aclosing(self.body_iterator):
            await super().stream_response(send)

    async def _events(self, messages: AsyncIterator[dict | str], failed: Callable[[Exception], dict]):
        async with aclosing(messages):
            try:
                async for each in messages:
                    yield f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n"
            except Exception as error:
                yield f"data: {json.dumps(failed(error))}\n\n"


async def unless_gone(request: Request, answer: Awaitable):
    """Returns the awaited result; cancels it, and refuses the request, once the app has disconnected."""

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, gone = asyncio.ensure_future(answer), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise cancelled()
        return answering.result()
    finally:
        answering.cancel()
        gone.cancel()


async def texts_and_result(client: Client, method: str, params: dict) -> AsyncIterator[str | dict]:
    """Yields the chunks of a text, then the result. Ends the request if it is closed before."""
    chunks: asyncio.Queue[str | None] = asyncio.Queue()
    request = asyncio.create_task(client.request(method, params, chunks.put_nowait))
    request.add_done_callback(lambda _: chunks.put_nowait(None))
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        yield request.result()
    finally:
        request.cancel() or request.cancelled() or request.exception()  # which nobody asks for if the app is gone
