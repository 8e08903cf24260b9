"""Apps that speak HTTP: with the `openai` package, in plain requests, and what is refused."""

import json
import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_door import HELLO, open_door_of_notes
from served import SECONDS, wait_until

from sebp_edge.serve.http.door import listen

ROOT = Path(__file__).parents[2]
needs_openai = pytest.mark.skipif(not find_spec("openai"), reason="needs the package openai")
NODE = shutil.which("node")
needs_npms_openai = pytest.mark.skipif(
    not NODE or subprocess.run([NODE, "-e", 'require("openai")'], capture_output=True).returncode != 0,
    reason="needs Node, and the npm package openai where NODE_PATH points",
)
# In: the base URL, the token, a request. Out: what its app sees of the answers.
NPMS_OPENAI = """
const OpenAI = require("openai");
const [baseURL, apiKey, asked] = process.argv.slice(1);
async function main() {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const seen = { models: [], deltas: [] };
  for await (const model of await client.models.list()) seen.models.push(model.id);
  const request = JSON.parse(asked);
  seen.whole = await client.chat.completions.create(request);
  const options = { ...request, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create(options)) {
    seen.deltas.push(chunk.choices[0]?.delta.content ?? "");
    seen.usage = chunk.usage;
  }
  seen.final = await client.chat.completions.stream(request).finalContent();
  const prompt = { model: "default", prompt: "the boat", temperature: 0 };
  seen.text = (await client.completions.create(prompt)).choices[0].text;
  const question = [{ role: "user", content: "Where does the key of the shed hang?" }];
  seen.cited = (await client.chat.completions.create({ model: "base:ask", messages: question })).choices[0].message;
  for (const changed of [{ model: "gone" }, { n: 2 }]) {
    const error = await client.chat.completions.create({ ...request, ...changed }).catch((error) => error);
    (seen.errors ??= []).push([error.constructor.name, error.status, error.code]);
  }
  const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
  await stranger.models.list().catch((error) => seen.errors.push([error.constructor.name, error.status, error.code]));
  const left = await client.chat.completions.create({ ...request, max_tokens: 100, stream: true });
  for await (const chunk of left) break;
  console.log(JSON.stringify(seen));
}
main();
"""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIKELIEST = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def door(tmp_path_factory, store_of_notes, model_folder):
    """A server with an adapter, a folder with a note, and an origin whose pages may use it."""
    data = tmp_path_factory.mktemp("door")
    with open_door_of_notes(data, store_of_notes, model_folder, "--origin", "app://notes") as door:
        yield door


@pytest.fixture
def client(door):
    import openai

    with openai.OpenAI(base_url=door.address, api_key=door.token, max_retries=0) as client:
        yield client


@needs_openai
def test_openais_client_lists_models_and_has_a_chat_whole_and_streamed(door, client):
    assert [each.id for each in client.models.list()] == ["base", "default", "base:ask", "default:ask", "default@1"]
    asked = {"model": "base", "messages": HELLO, "seed": 5, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == choice.message.content
    assert len(chunks) > 2 and {each.id for each in chunks} == {last.id}
    assert [each.choices[0].finish_reason for each in chunks] == [*[None] * (len(chunks) - 1), "length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    prompt = {"messages": HELLO, "sampling_seed": 5, "max_new_tokens": 12}
    assert door.rpc("generate", model=client_model(door), **prompt)["text"] == choice.message.content


def client_model(door):
    """The folder of the server's base model."""
    return next(argument for argument in door.process.args if str(argument).endswith("micro-llama"))


def keys_of(door):
    """The folder of notes."""
    return door.file.parents[1] / "keys"


@needs_openai
def test_openais_client_completes_a_text_whole_and_streamed_up_to_a_stop_string(client):
    asked = {"model": "base", "prompt": "the boat", "temperature": 0}
    whole = client.completions.create(**asked)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (16, "length")
    text = whole.choices[0].text
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(each.choices[0].text for each in chunks) == text
    stopped = client.completions.create(**asked, stop=text[4:7]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[4:7])], "stop")


@needs_npms_openai
def test_npms_openai_has_the_same_conversation(door):
    asked = {"model": "base", "messages": HELLO, "seed": 5, "max_tokens": 12}
    command = [NODE, "-e", NPMS_OPENAI, door.address, door.token, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["models"] == ["base", "default", "base:ask", "default:ask", "default@1"]
    (choice,) = seen["whole"]["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert "".join(seen["deltas"]) == seen["final"] == choice["message"]["content"] and len(seen["deltas"]) > 2
    assert seen["usage"] == seen["whole"]["usage"] and seen["usage"]["completion_tokens"] == 12
    same = {"model": "default", "prompt": "the boat", "temperature": 0}
    assert seen["text"] == door.call("POST", COMPLETIONS, same)[1]["choices"][0]["text"]
    assert seen["cited"]["content"] == "The key of the shed hangs behind the green door."
    assert seen["cited"]["annotations"][0]["url_citation"]["title"] == "shed.md"
    refused = ["BadRequestError", 400, "invalid_params"]
    assert seen["errors"] == [
        ["NotFoundError", 404, "model_not_found"],
        refused,
        ["AuthenticationError", 401, "invalid_api_key"],
    ]
    wait_until(lambda: door.rpc("status")["worker"]["requests"] == 0)


def test_a_models_name_chooses_the_adapter_and_its_version(door):
    texts = {}
    for name in ("base", "default", "default@1", "base"):
        status, answer = door.call("POST", COMPLETIONS, {"model": name, "prompt": "the boat", **LIKELIEST})
        assert (status, answer["model"]) == (200, name)
        assert texts.setdefault(name, answer["choices"][0]["text"]) == answer["choices"][0]["text"]
    assert texts["default"] == texts["default@1"] != texts["base"]
    for name in ("other", "default@2", "other@1", "a/b", "../keys", "a" * 10_000):
        status, answer = door.chat(model=name)
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), answer
        assert len(answer["error"]["message"]) < 300


@needs_openai
def test_questions_are_answered_from_the_folder_with_the_note_as_an_annotation(client):
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who has the boat?"}]
    said += [{"role": "assistant", "content": "Ada."}, {"role": "user", "content": "Where does the key hang?"}]
    asked = {"model": "base:ask", "messages": said, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.content == "The key of the shed hangs behind the green door." and whole.usage is None
    cited = message.annotations[0].url_citation
    assert (cited.url, cited.title, cited.start_index) == ("shed.md#L1", "shed.md", 0)
    assert message.content[: cited.end_index] == message.content
    *texts, last = client.chat.completions.create(**asked, stream=True)
    assert "".join(each.choices[0].delta.content for each in texts) == message.content
    assert last.choices[0].delta.annotations[0]["url_citation"]["url"] == cited.url


def test_what_changes_nothing_is_ignored(door):
    ignored = {"user": "me", "tools": [], "n": 1, "logprobs": False, "response_format": {"type": "text"}, "store": None}
    parts = [
        {"role": "developer", "content": "Be"},
        {"role": "user", "content": [{"type": "text", "text": "the boat"}]},
    ]
    plain = [{"role": "system", "content": "Be"}, *HELLO]
    status, answer = door.chat(messages=parts, tool_choice="auto", max_completion_tokens=8, **ignored, **LIKELIEST)
    assert status == 200
    assert answer["choices"] == door.chat(messages=plain, **LIKELIEST)[1]["choices"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"n": 2}, "'n'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": ["a"]}, "messages"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "not text"),
        ({"messages": [{"role": "user"}]}, "not text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "from the user"),
        ({"model": "base:ask", "messages": [{"role": "assistant", "content": "a"}]}, "user's"),
        ({"max_tokens": 0}, "'max_tokens' is not a whole number of at least 1"),
        ({"max_completion_tokens": "many"}, "'max_completion_tokens' is not a whole number"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 5}, "top_p"),
        ({"seed": 1.5}, "sampling_seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
    ],
)
def test_what_would_change_the_answer_or_is_no_request_is_refused_in_openais_form(door, body, words):
    for stream in (False, True):
        status, answer = door.chat(stream=stream, **body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert words in answer["error"]["message"] and answer["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", "b"], [1, 2], [[1, 2]]])
def test_a_prompt_that_is_not_one_text_is_refused(door, prompt):
    status, answer = door.call("POST", COMPLETIONS, {"model": "base", "prompt": prompt})
    assert status == 400 and "prompt" in answer["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'"\\ud800'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/rpc"])
def test_what_is_no_json_object_is_refused(door, path, body):
    status, answer = door.call("POST", path, body)
    assert status == (200 if path == "/rpc" else 400)
    assert "JSON" in answer["error"]["message"]


def test_the_token_the_name_and_the_origin_are_checked_before_all_else(door):
    """A page whose name an attacker points at this machine sends that name, and each page its origin."""
    for path, method in (("/v1/models", "GET"), (CHAT, "POST"), ("/rpc", "POST"), ("/nowhere", "GET")):
        for headers, status in (
            ({"Authorization": None}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": f"Bearer {door.token}x"}, 401),
            ({"Authorization": door.token}, 401),
            ({"Host": "evil.example"}, 403),
            ({"Host": f"evil.example:{door.port}"}, 403),
            ({"Host": "127.0.0.1"}, 403),
            ({"Host": f"127.0.0.1:{door.port + 1}"}, 403),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": f"http://127.0.0.1:{door.port}"}, 403),
            ({"Origin": "app://notes", "Host": "evil.example"}, 403),
        ):
            found, answer = door.call(method, path, None if method == "GET" else {}, **headers)
            assert found == status and answer["error"]["type"] == "invalid_request_error", (headers, answer)
    assert door.call("GET", "/v1/models", Host=f"localhost:{door.port}")[0] == 200


def test_only_pages_of_a_named_origin_may_read_answers(door):
    allowed = "Access-Control-Allow-Origin"
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    for origin, status in (("app://notes", 200), ("https://evil.example", 400)):
        for method, headers in (("GET", {}), ("OPTIONS", {"Authorization": None, **asked})):
            connection = door.send(method, "/v1/models", Origin=origin, **headers)
            answer = connection.getresponse()
            connection.close()
            assert answer.status == (status if method == "OPTIONS" or status == 200 else 403)
            assert answer.headers[allowed] == (origin if status == 200 else None)


def test_other_paths_and_methods_are_answered_in_the_same_form(door):
    for method, path, status in (
        *(("GET", "/", 404), ("GET", "/v1/embeddings", 404), ("POST", "/v1/models/../../rpc", 404)),
        *(("GET", CHAT, 405), ("PUT", "/rpc", 405), ("DELETE", "/v1/models", 405)),
    ):
        found, answer = door.call(method, path)
        assert found == status and answer["error"]["message"], (method, path)


def test_a_body_of_100_mb_is_refused_and_not_kept(door):
    import psutil

    before = psutil.Process(door.process.pid).memory_info().rss
    for path, status in ((CHAT, 413), ("/rpc", 200)):
        found, answer = door.call("POST", path, b" " * 100_000_000)
        assert found == status and "8 MiB" in answer["error"]["message"]
    assert psutil.Process(door.process.pid).memory_info().rss < before + 2**26
    assert door.call("POST", CHAT, b" " * 100_000_000, Authorization=None)[0] == 401


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /v1/models HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_http_is_refused_and_others_are_answered(door, sent):
    with socket.create_connection(("127.0.0.1", door.port)) as other:
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: other.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 40") or not answer
    assert door.call("GET", "/v1/models")[0] == 200


def test_methods_of_the_protocol_are_answered_as_over_a_pipe(door):
    assert [each["name"] for each in door.rpc("adapters.list")["adapters"]] == ["default"]
    assert door.rpc("status")["pid"] > 0
    same = door.rpc("adapters.diff", name="default", old=1, new=1)
    assert same["unchanged"] > 20 and same["came"] == same["went"] == same["changed"] == []
    assert door.rpc("adapters.diff", name="default")["data"]["code"] == "adapter"
    (hit, *_) = door.rpc("search", question="Where does the key of the shed hang?", paths=[str(keys_of(door))])["hits"]
    assert hit["passage"]["path"] == str(keys_of(door) / "shed.md") and hit["strength"] > 1
    assert {"notes", "chat", "ask"} < {*door.rpc("recipes")["recipes"]}
    for method, params, number, code in (
        ("nothing", {}, -32601, "unknown_method"),
        ("initialize", {"protocol": 1}, -32601, "unknown_method"),
        ("cancel", {"request": 1}, -32601, "unknown_method"),
        ("jobs.unsubscribe", {"id": "first"}, -32601, "unknown_method"),  # of other apps, too
        ("jobs.get", {"id": "none"}, -32000, "unknown_job"),
        ("jobs.subscribe", {"id": "none"}, -32000, "unknown_job"),
        ("jobs.subscribe", {}, -32602, "invalid_params"),
        ("generate", {"on_text": 1}, -32602, "invalid_params"),
        ("plan", {"paths": ["/etc"]}, -32000, "folder_not_allowed"),
        ("search", {"question": "x", "paths": ["/etc"]}, -32000, "folder_not_allowed"),
    ):
        error = door.rpc(method, **params)
        assert (error["code"], error["data"]["code"]) == (number, code)
    status, answer = door.call("POST", "/rpc", {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]})
    assert (status, answer["error"]["data"]["code"]) == (200, "invalid_params")


def test_a_text_comes_as_events_if_the_app_accepts_them(door):
    params = {"prompt": "the boat", "model": client_model(door), "temperature": 0, "max_new_tokens": 8}
    request = {"jsonrpc": "2.0", "id": 3, "method": "generate", "params": params}
    *texts, answer = door.stream("/rpc", request, Accept="text/event-stream")
    assert {(each["method"], each["params"]["request"]) for each in texts} == {("text", 3)} and len(texts) > 1
    assert "".join(each["params"]["text"] for each in texts) == answer["result"]["text"]
    request["params"]["temperature"] = -1
    (refused,) = door.stream("/rpc", request, Accept="text/event-stream")
    assert (refused["id"], refused["error"]["data"]["code"]) == (3, "invalid_option")


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_guides_requests_are_answered(door):
    guide = (ROOT / "sebp_edge/guide/server.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```sh\n(# Requests with curl.*?)```", guide, re.DOTALL)
    code = code.replace("7327", str(door.port)).replace("~/.local/share/sebp-edge/http-token", str(door.file))
    done = subprocess.run(["bash", "-c", code.replace('"notes"', '"default"')], capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    chat, rest = json.JSONDecoder().raw_decode(done.stdout.decode())[0], done.stdout.decode()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["role"] == "assistant"
    assert '"text_completion"' in rest and "data: [DONE]" in rest
    assert "green door" in rest and '"url_citation"' in rest and rest.endswith('"unreadable": []}}')


def test_it_listens_on_this_machine_only_and_sends_each_message_at_once():
    with listen(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        assert listening.proto == socket.IPPROTO_TCP  # by which asyncio knows that it need not wait


def test_the_token_is_for_its_owner_only_and_is_kept(door):
    assert door.file.stat().st_mode & 0o777 == 0o600
    assert len(door.token) >= 40
    assert json.dumps(door.token) not in json.dumps(door.rpc("status"))
