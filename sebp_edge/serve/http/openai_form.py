"""Translates requests of OpenAI's protocol into this server's, and results and errors back."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import quote

from sebp_edge.serve.messages import Refusal

# The model without an adapter, and the end of the name of one that answers from the allowed folders.
BASE, ASK = "base", ":ask"
# The most new tokens if the request has no limit; -1 is none.
MAX_CHAT, MAX_COMPLETION = 1024, 16
# Parameters that are not supported and would change the answer, with the value that changes nothing; nor do empty ones.
_NOT_OFFERED = {"n": 1, "best_of": 1, "response_format": {"type": "text"}, "modalities": ["text"]} | dict.fromkeys(
    (
        *("tools", "functions", "logprobs", "top_logprobs", "logit_bias", "frequency_penalty", "presence_penalty"),
        *("echo", "suffix", "audio", "web_search_options"),
    )
)
_OPTIONS = {"temperature": "temperature", "top_p": "top_p", "seed": "sampling_seed"}
_OPTIONS |= {"top_k": "top_k", "repetition_penalty": "repetition_penalty"}
# HTTP's status by the code of an error. Others have 503 if the same request may succeed later, else 400.
_STATUS = {"invalid_api_key": 401, "forbidden": 403, "folder_not_allowed": 403, "adapter": 404, "not_found": 404}
_STATUS |= {"not_allowed": 405, "too_long": 413, "internal": 500, "worker_broken": 500}


def request_of(body: dict, *, is_chat: bool) -> tuple[str, dict]:
    """Returns the method that answers a request, and its parameters but for the base model and the folders."""
    for name, neutral in _NOT_OFFERED.items():
        if body.get(name) and body[name] != neutral:
            raise Refusal("invalid_params", f"{name!r} is not offered here.")
    name, version, asks = _parse_model(body.get("model"))
    params = {"adapter": name, "version": version}
    given = ((each, body.get(each)) for each in ("max_completion_tokens", "max_tokens"))
    key, limit = next((pair for pair in given if pair[1] not in (None, -1)), (None, None))
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise Refusal("invalid_params", f"{key!r} is not a whole number of at least 1; correct it or leave it out.")
        params["max_new_tokens"] = limit
    messages = _messages_of(body.get("messages")) if is_chat else [{"role": "user", "content": _prompt_of(body)}]
    if asks:
        return "ask", params | _question_of(messages)
    params = {"max_new_tokens": MAX_CHAT if is_chat else MAX_COMPLETION} | params
    params |= {ours: body[theirs] for theirs, ours in _OPTIONS.items() if body.get(theirs) is not None}
    stop = body.get("stop") or []
    params["stop"] = [each for each in stop if each] if isinstance(stop, list) else [stop]
    return "generate", params | ({"messages": messages} if is_chat else {"prompt": messages[0]["content"]})


def _parse_model(model: object) -> tuple[str | None, int | None, bool]:
    """Returns the adapter, its version, and whether to answer from the folders."""
    if not isinstance(model, str) or not model:
        raise Refusal("invalid_params", "'model' is missing; GET /v1/models lists all.")
    name = model.removesuffix(ASK)
    adapter, _, version = name.rpartition("@")
    if adapter and version.isdecimal() and len(version) < 10:
        return adapter, int(version), name != model
    return None if name == BASE else name, None, name != model


def _messages_of(messages: object) -> list[dict]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refusal("invalid_params", "'messages' is not a list of objects.")
    roles = ["system" if each.get("role") == "developer" else each.get("role") for each in messages]
    return [
        {"role": role, "content": _text_of(each.get("content"))} for role, each in zip(roles, messages, strict=True)
    ]


def _text_of(content: object) -> str:
    """Returns what a message says, as a text or as a list of its parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [each.get("text") if isinstance(each, dict) else None for each in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal("invalid_params", "The content of a message is not text; images, sounds and files are not read.")
    return "".join(texts)


def _prompt_of(body: dict) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise Refusal("invalid_params", "'prompt' is not one text.")
    return prompt


def _question_of(messages: list[dict]) -> dict:
    *earlier, last = [each for each in messages if each["role"] != "system"] or [{"role": None}]
    if last["role"] != "user":
        raise Refusal("invalid_params", "The last message must be the user's.")
    turns = [pair for pair in pairwise(earlier) if [each["role"] for each in pair] == ["user", "assistant"]]
    before = [each["content"] for pair in turns for each in pair]
    return {"question": last["content"], "before": before}


@dataclass(frozen=True)
class Reply:
    """An answer to a request, whole or in chunks.

    Args:
        model: as the app has named it.
    """

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: dict) -> dict:
        """Returns the answer with a result of `generate` or `ask`."""
        text = {"text": result["text"]}
        choice = {"message": _message(result["text"]) | _annotations(result)} if self.is_chat else text
        return self._about("", [choice | _end(result)]) | {"usage": _usage(result)}

    async def chunks(
        self, first: str | dict, rest: AsyncIterator[str | dict], *, with_usage: bool
    ) -> AsyncIterator[dict | str]:
        """Yields the chunks of an answer, from the chunks of its text and its result."""
        text, each = "", first
        while isinstance(each, str):
            yield self._chunk(each, is_first=not text)
            text, each = text + each, await anext(rest)
        if not each["text"].startswith(text):  # `Executor` leaves out chunks that there is no room for
            raise Refusal("incomplete", "A part of the text was lost on the way.", retry=True)
        left = each["text"].removeprefix(text)
        if left or not text:  # the first chunk names the role, also where the model has written nothing
            yield self._chunk(left, is_first=not text)
        yield self._about(".chunk", [({"delta": _annotations(each)} if self.is_chat else {"text": ""}) | _end(each)])
        if with_usage:
            yield self._about(".chunk", []) | {"usage": _usage(each)}
        yield "[DONE]"

    def _chunk(self, text: str, *, is_first: bool) -> dict:
        delta = _message(text) if is_first else {"content": text}
        choice = {"delta": delta} if self.is_chat else {"text": text}
        return self._about(".chunk", [choice | {"finish_reason": None}])

    def _about(self, suffix: str, choices: list[dict]) -> dict:
        kind, begin = (f"chat.completion{suffix}", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        about = {"id": f"{begin}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return about | {"choices": [{"index": 0, "logprobs": None, **choice} for choice in choices]}


def _message(text: str) -> dict:
    return {"role": "assistant", "content": text}


def _end(result: dict) -> dict:
    return {"finish_reason": result.get("finish", "stop")}


def _usage(result: dict) -> dict | None:
    """Returns how many tokens there were; None for an answer from the folders, which may take no model."""
    if "new_tokens" not in result:
        return None
    prompt, new = result["prompt_tokens"], result["new_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _annotations(result: dict) -> dict:
    """Returns the sources of an answer as citations: the document as the address, and the passage."""
    notes = []
    for each in result.get("sources", ()):
        title = ", ".join((each["document"], *each["headings"]))
        about = {"url": f"{quote(each['document'])}#L{each['line']}", "title": title, "content": each["text"]}
        place = {"start_index": 0, "end_index": len(result["text"])}
        notes.append({"type": "url_citation", "url_citation": place | about})
    return {"annotations": notes} if notes else {}


def models_of(adapters: Sequence[dict], *, asks: bool) -> dict:
    """Returns the models by the names that requests have for them.

    Args:
        adapters: those of `adapters.list`.
        asks: whether there are folders to answer from.
    """
    names = [BASE, *(each["name"] for each in adapters if each["active"] is not None)]
    names += [name + ASK for name in names] if asks else []
    names += [f"{each['name']}@{version}" for each in adapters for version in each["versions"]]
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "sebp-edge"} for name in names]
    return {"object": "list", "data": models}


def error_and_status(error: dict) -> tuple[dict, int]:
    """Returns an error of JSON-RPC's in OpenAI's form, and HTTP's status."""
    data = error["data"]
    status = _STATUS.get(data["code"], 503 if data.get("retry") else 400)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "model_not_found" if data["code"] == "adapter" else data["code"]
    return {"error": {"message": error["message"], "type": kind, "param": None, "code": code}}, status
