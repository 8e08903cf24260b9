"""Answers requests of OpenAI's protocol."""

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.run.base_models import find_base_model
from sebp_edge.serve.client import Client
from sebp_edge.serve.http.openai_form import Reply, error_and_status, models_of, request_of
from sebp_edge.serve.http.streaming import EventStream, body_of, described, texts_and_result, to_json, unless_gone
from sebp_edge.serve.messages import Refusal, read_object
from sebp_edge.store.adapter_store import AdapterStore

Answer = Callable[[Request], Awaitable[Response]]


class OpenAi:
    """Answers requests through a client of the server.

    Args:
        model: the base model without an adapter; adapters have their own.
        without: what the server may read, but no question is answered from: the model's own files.
    """

    def __init__(self, client: Client, store: AdapterStore, model: str, without: Sequence[str]):
        self._client, self._store, self._model = client, store, model
        self._without = {*map(os.path.realpath, without)}

    def routes(self) -> list[Route]:
        """Returns the paths that are offered."""
        return [
            Route("/v1/models", answering(self._models), methods=["GET"]),
            Route("/v1/chat/completions", answering(partial(self._write, is_chat=True)), methods=["POST"]),
            Route("/v1/completions", answering(partial(self._write, is_chat=False)), methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        """Lists the base model and the adapters."""
        adapters = (await self._client.call("adapters.list"))["adapters"]
        return to_json(models_of(adapters, asks=bool(await self._folders())))

    async def _folders(self) -> list[str]:
        """Returns those that questions are answered from now."""
        return [each for each in (await self._client.call("folders"))["folders"] if each not in self._without]

    async def _base_of(self, adapter: str | None, version: int | None) -> str:
        """Returns the base model of an adapter, whose files the server may read from then on; none is downloaded."""
        if adapter is None:
            return self._model
        record = self._store.adapter(adapter).open(version).record
        if record.base_model == resolve(self._model).public_name:
            return self._model
        model = find_base_model(self._store, record)
        if Path(model).is_absolute() and (real := os.path.realpath(model)) not in self._without:
            self._without.add(real)
            await self._client.call("folders", add=[real])
        return model

    async def _write(self, request: Request, *, is_chat: bool) -> Response:
        body = read_object(await body_of(request))
        method, params = request_of(body, is_chat=is_chat)
        params["model"] = await self._base_of(params["adapter"], params["version"])
        if method == "ask":
            params["paths"] = await self._folders()
            if not params["paths"]:
                message = "There is no folder to answer from; start the server with --folder."
                raise Refusal("invalid_params", message)
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
