"""Answers requests of OpenAI's protocol."""

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.serve.client import Client
from sebp_edge.serve.http.openai_form import Reply, error_and_status, models_of, request_of
from sebp_edge.serve.http.streaming import EventStream, body_of, described, texts_and_result, to_json, unless_gone
from sebp_edge.serve.messages import Refusal, read_object

Answer = Callable[[Request], Awaitable[Response]]


class OpenAi:
    """Answers requests through a client of the server.

    Args:
        model: the base model.
        without: what the server may read, but no question is answered from: the model's own files.
    """

    def __init__(self, client: Client, model: str, without: Sequence[str]):
        self._client, self._model, self._without = client, model, {*map(os.path.realpath, without)}

    def routes(self) -> list[Route]:
        """Returns the paths that are offered."""
        return [
            Route("/v1/models", answering(self._models), methods=["GET"]),
            Route("/v1/chat/completions", answering(partial(self._write, is_chat=True)), methods=["POST"]),
            Route("/v1/completions", answering(partial(self._write, is_chat=False)), methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        """Lists the base model and its adapters."""
        adapters, base = (await self._client.call("adapters.list"))["adapters"], resolve(self._model).public_name
        own = [each for each in adapters if each["base_model"] in (None, base)]
        return to_json(models_of(own, asks=bool(await self._folders())))

    async def _folders(self) -> list[str]:
        """Returns those that questions are answered from now."""
        return [each for each in (await self._client.call("folders"))["folders"] if each not in self._without]

    async def _write(self, request: Request, *, is_chat: bool) -> Response:
        body = read_object(await body_of(request))
        method, params = request_of(body, self._model, await self._folders(), is_chat=is_chat)
        reply = Reply(body["model"], is_chat)
        if not body.get("stream"):
            return to_json(reply.whole(await unless_gone(request, self._client.request(method, params))))
        found = texts_and_result(self._client, method, params)
        first = await unless_gone(request, anext(found))  # so that an error has its status
        options = body.get("stream_options")
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return EventStream(reply.chunks(first, found, with_usage=with_usage), lambda error: in_form(error)[0])


def answering(answer: Answer) -> Answer:
    """Returns what answers requests, also with an error."""

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except Exception as error:
            return to_json(*in_form(error))

    return endpoint


async def no_such_path(request: Request, error: HTTPException) -> Response:
    """Answers a request for what is not offered."""
    code, what = ("not_allowed", "method") if error.status_code == 405 else ("not_found", "path")
    return to_json(*in_form(Refusal(code, f"There is no such {what} here.")))


def in_form(error: Exception) -> tuple[dict, int]:
    """Returns an error in OpenAI's form, and HTTP's status."""
    return error_and_status(described(error))
