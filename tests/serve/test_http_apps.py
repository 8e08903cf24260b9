"""Requests as Open WebUI, Continue and `llm` send them, by their sources, and what these apps read of the answers.

open-webui/open-webui: routers/openai.py, routers/tasks.py; continuedev/continue: core/llm/llms/OpenAI.ts,
core/llm/openaiTypeConverters.ts, packages/openai-adapters; simonw/llm: default_plugins/openai_models.py.
"""

import json
from contextlib import closing

import pytest
from http_door import open_door_of_notes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [
    {"role": "system", "content": "You write short notes."},
    {"role": "user", "content": "the boat"},
    {"role": "assistant", "content": "is green"},
    {"role": "user", "content": "and the oars"},
]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
STOPS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```", "\n\n\n"]
# The headers that are not a browser's; the token is added.
OPEN_WEBUI = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "Python/3.11 aiohttp/3.13.2"}
CONTINUE = {"Content-Type": "application/json", "Accept": "application/json", "X-Stainless-Lang": "js"}
LLM = {"Content-Type": "application/json", "Accept": "application/json", "X-Stainless-Lang": "python"}

REQUESTS = {
    "Open WebUI, a chat": (OPEN_WEBUI, CHAT, {"stream": True, "model": "base", "messages": SAID}),
    "Open WebUI, a chat with usage and its settings": (
        OPEN_WEBUI,
        CHAT,
        {"model": "default", "messages": SAID, **WITH_USAGE, "temperature": 0.8, "top_p": 0.9, "max_tokens": 8}
        | {"frequency_penalty": 0, "presence_penalty": 0, "seed": 7, "stop": ["###"], "logit_bias": {}},
    ),
    "Open WebUI, the title of a chat": (
        OPEN_WEBUI,
        CHAT,
        {"model": "base", "messages": [{"role": "user", "content": TITLE}], "stream": False}
        | {"max_completion_tokens": 1000},
    ),
    "Open WebUI, a question about notes": (
        OPEN_WEBUI,
        CHAT,
        {"stream": True, "model": "base:ask", "messages": [{"role": "user", "content": "Where is the key?"}]},
    ),
    "Continue, a chat": (
        CONTINUE,
        CHAT,
        {"messages": SAID, "model": "default", "max_tokens": 4096, "temperature": 0.5, **WITH_USAGE},
    ),
    "Continue, an empty message of the assistant": (
        CONTINUE,
        CHAT,
        {"messages": [SAID[1], {"role": "assistant", "content": " "}, SAID[3]], "model": "base", **WITH_USAGE},
    ),
    "Continue, ghost text": (
        CONTINUE,
        COMPLETIONS,
        {"prompt": "the boat is", "model": "default", "max_tokens": 256, "temperature": 0.01, "stream": True}
        | {"stop": STOPS},
    ),
    "llm, a prompt": (LLM, CHAT, {"messages": SAID[:2], "model": "base", **WITH_USAGE}),
    "llm --no-stream with options": (
        LLM,
        CHAT,
        {"messages": SAID, "model": "default@1", "stream": False, "temperature": 0.0, "max_tokens": 8, "top_p": 1.0}
        | {"stop": "###", "seed": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    ),
    "llm, a model that completes": (
        LLM,
        COMPLETIONS,
        {"prompt": "the boat", "model": "base", "max_tokens": 256, **WITH_USAGE},
    ),
}


@pytest.fixture(scope="module")
def door(tmp_path_factory, store_of_notes, model_folder):
    with open_door_of_notes(tmp_path_factory.mktemp("door"), store_of_notes, model_folder) as door:
        yield door


def read_events(answer):
    """Returns what an app reads of a stream: each line that begins with "data: ", up to the mark of the end."""
    events = []
    for line in answer:
        line = line.decode().strip()
        if line == "data: [DONE]":
            assert answer.read() in (b"", b"\n")
            return events
        if line:
            assert line.startswith("data: ")
            events.append(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("headers", [OPEN_WEBUI, CONTINUE, LLM])
def test_each_app_finds_the_models_by_their_id(door, headers):
    status, found = door.call("GET", "/v1/models", **headers)
    assert (status, found["object"]) == (200, "list")
    assert {"base", "default", "default@1", "base:ask"} <= {model["id"] for model in found["data"]}
    assert all({"id", "object", "created", "owned_by"} <= model.keys() for model in found["data"])


def events_of(door, headers, path, body):
    """Returns what an app reads of an answer: the events of a stream, or the one answer."""
    with closing(door.send("POST", path, json.dumps(body), **headers)) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        if not body["stream"]:
            return [json.loads(answer.read())]
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return read_events(answer)


@pytest.mark.parametrize("name", REQUESTS)
def test_an_apps_request_is_answered_as_it_reads_answers(door, name):
    headers, path, body = REQUESTS[name]
    events = events_of(door, headers, path, body)
    is_chat, has_usage = path == CHAT, "stream_options" in body
    kind = "chat.completion" if is_chat else "text_completion"
    if body["stream"]:
        kind += ".chunk" if is_chat else ""
        *events, last = events if has_usage else [*events, {"usage": None, "choices": []}]
        assert last["choices"] == []
        usage, choices = last["usage"], [choice for event in events for choice in event["choices"]]
        texts = [choice["delta"].get("content") if is_chat else choice["text"] for choice in choices]
        if is_chat:
            assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    else:
        usage, choices = events[0]["usage"], events[0]["choices"]
        texts = [choices[0]["message"]["content"]]
    assert {event["object"] for event in events} == {kind} and {event["model"] for event in events} == {body["model"]}
    assert len({event["id"] for event in events}) == 1 and all(choice["index"] == 0 for choice in choices)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    assert all(isinstance(text, str) for text in texts if text is not None)  # empty where a text ends at once
    if has_usage or not body["stream"]:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_an_answer_without_text_names_its_role_first(door):
    body = {"model": "base", "messages": SAID, "seed": 1, "max_tokens": 64}
    [answer] = events_of(door, LLM, CHAT, body | {"stream": False})
    stop = answer["choices"][0]["message"]["content"][0]
    first, last = events_of(door, LLM, CHAT, body | {"stream": True, "stop": stop})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
