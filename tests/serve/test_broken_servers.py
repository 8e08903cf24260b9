"""Both clients beside servers that misbehave, and apps that do: every call ends, and the app goes on."""

import asyncio
import json
import sys

import pytest
from typescript import run_typescript

from sebp_edge.serve.client import Client, ServerError

# What it does is the name of the method that is asked for.
BROKEN = r"""
import json, os, sys, time

def send(**message):
    write(json.dumps(message) + "\n")

def write(words):
    sys.stdout.write(words)
    sys.stdout.flush()

def event(number, event="state", **facts):
    send(method="job.event", params={"job": params["id"], "number": number, "event": {"event": event} | facts})

for line in sys.stdin:
    request = json.loads(line)
    id, params = request["id"], request["params"]
    match request["method"]:
        case "null id":
            send(id=None, error={"code": -32700, "message": "It is not JSON.", "data": {"code": "parse_error"}})
        case "no JSON":
            write("Loading 100 %\n")
        case "no object":
            write("[1, 2]\n")
        case "no text":
            sys.stdout.buffer.write(b"\xff\xfe\n")
            sys.stdout.flush()
        case "deep":
            write("[" * 200_000 + "\n")
        case "two halves":
            write('{"id": %d, "re\nsult": {}}\n' % id)
        case "unknown id":
            send(id=id + 1000, result={})
        case "id of a text":
            send(id=str(id), result={})
        case "no result":
            send(id=id)
        case "odd text":
            send(method="text")
        case "bare error":
            send(id=id, error={"code": -32601, "message": "There is no such method."})
        case "half a line":
            write('{"id": %d, "res' % id)
            sys.exit()
        case "an end":
            sys.exit(3)
        case "no output":
            os.close(1)
            time.sleep(600)
        case "no input":
            os.close(0)
            send(id=id, result={})
            time.sleep(600)
        case "a huge line":
            while True:
                write("x" * 2**20)
        case "an answer again":
            send(id=1, result={})
            send(method="unknown", params=[])
            send(id=id, result={})
        case "texts":
            for text in ("a", "b"):
                send(method="text", params={"request": id, "text": text})
            send(id=id, result={"text": "ab"})
        case "jobs.subscribe":
            states = ["running", "paused", "running", "interrupted"]
            last, state = (4, "interrupted") if params["id"] == "over" else (5, "queued")
            send(id=id, result={"job": {"last_event": last, "state": state}})
            for number, state in enumerate(states, start=1):
                if number > params["since"]:
                    event(number, state=state)
            if params["id"] == "damaged":
                write('{"method": "job.ev\n')
            elif params["id"] == "resumed":
                event(5, state="queued")
                event(6, "step")
                event(7, state="done")
                event(8, "step")
        case _:
            send(id=id, result={})
"""
COMMAND = [sys.executable, "-S", "-c", BROKEN]
BAD = ["bad_message", "answered"]
ENDS = ["server_ended", "server_ended"]
# How a call ends, and one after it.
FOUND = {
    "null id": ["parse_error", "answered"],
    **dict.fromkeys(["no JSON", "no object", "no text", "deep", "two halves", "unknown id", "id of a text"], BAD),
    **dict.fromkeys(["no result", "odd text"], BAD),
    "bare error": ["", "answered"],
    **dict.fromkeys(["half a line", "an end", "no output"], ENDS),
    "no input": ["answered", "server_ended"],
    "a huge line": ENDS,
    "an answer again": ["answered", "answered"],
}


@pytest.mark.slow
def test_python_client_ends_every_call_of_a_server_that_misbehaves():
    async def outcome(call):
        try:
            await asyncio.wait_for(call, 60)
            return "answered"
        except ServerError as error:
            return error.code

    async def both(case):
        client = await Client.start(COMMAND)
        found = [await outcome(client.call(case)), await outcome(client.call("ping"))]
        await client.close()
        assert client.process.returncode is not None
        return found

    async def main():
        return dict(zip(FOUND, await asyncio.gather(*map(both, FOUND)), strict=True))

    assert asyncio.run(main()) == FOUND


@pytest.mark.slow
def test_typescript_client_ends_every_call_of_a_server_that_misbehaves(tmp_path):
    conversation = """
import {{ Client }} from "{client}";
const outcome = (call: Promise<unknown>) => call.then(() => "answered", (error) => error.code);
const both = async (method: any) => {{
  const client = await Client.start({command});
  const found = [method, [await outcome(client.call(method)), await outcome(client.call("ping"))]];
  await client.close();
  return found;
}};
const found = await Promise.all(JSON.parse(process.argv[2]).map(both));
console.log(JSON.stringify(Object.fromEntries(found)));
"""
    assert run_typescript(tmp_path, list(FOUND), conversation=conversation, command=COMMAND) == FOUND


def test_a_server_that_cannot_start_is_refused_with_a_code(tmp_path):
    (tmp_path / "not-executable").touch()
    programs = ["no-such-program-at-all", str(tmp_path / "not-executable"), str(tmp_path)]

    async def main():
        for program in programs:
            with pytest.raises(ServerError, match="The server cannot start") as caught:
                await Client.start((program, "serve"))
            assert caught.value.code == "cannot_start"

    asyncio.run(main())
    conversation = """
import {{ Client }} from "{client}";
const codes = [];
for (const program of {command}) await Client.start([program]).catch((error) => codes.push(error.code));
console.log(JSON.stringify(codes));
"""
    found = run_typescript(tmp_path, conversation=conversation, command=programs)
    assert found == ["cannot_start"] * len(programs)


def test_what_no_server_could_read_is_not_sent():
    """A line may have 8 MiB without its end; a little shorter, it is sent."""

    async def main():
        async with await Client.start(COMMAND) as client:
            for code, params in (
                ("invalid_params", {"seed": float("nan")}),
                ("invalid_params", {"seed": {1}}),
                ("too_long", {"texts": ["word " * 1_900_000]}),
            ):
                with pytest.raises(ServerError) as caught:
                    await client.call("inspect", **params)
                assert caught.value.code == code
            most = 2**23 - len(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "any", "params": {"text": ""}}))
            with pytest.raises(ServerError) as caught:
                await client.call("any", text="x" * (most + 1))
            assert caught.value.code == "too_long"
            assert await client.call("any", text="x" * most) == {}

    asyncio.run(main())


def test_what_no_server_could_read_is_not_sent_by_typescript(tmp_path):
    conversation = """
import {{ Client }} from "{client}";
const client = await Client.start({command});
const codes: unknown[] = [];
const circular: any = {{}};
circular.self = circular;
const most = 2 ** 23 - JSON.stringify({{ jsonrpc: "2.0", id: 2, method: "any", params: {{ text: "" }} }}).length;
for (const params of [
  {{ seed: NaN }},
  {{ seed: 1n }},
  circular,
  {{ texts: ["word ".repeat(1_900_000)] }},
  {{ text: "x".repeat(most + 1) }},
  {{ text: "x".repeat(most) }},
] as any[])
  await client.call("any" as any, params).then(() => codes.push("answered"), (error) => codes.push(error.code));
await client.close();
console.log(JSON.stringify(codes));
"""
    found = run_typescript(tmp_path, conversation=conversation, command=COMMAND)
    assert found == [*["invalid_params"] * 3, *["too_long"] * 2, "answered"]


class Mistake(Exception):
    pass


@pytest.mark.parametrize("error", [Mistake, StopIteration, asyncio.CancelledError, KeyboardInterrupt])
def test_a_callback_that_raises_ends_its_call_only(error):
    seen = []

    def fail(text):
        seen.append(text)
        raise error

    async def main():
        async with await Client.start(COMMAND) as client:
            with pytest.raises(RuntimeError if error is StopIteration else error):
                await client.call("texts", on_text=fail)
            assert seen == ["a"]
            assert await client.call("texts", on_text=seen.append) == {"text": "ab"}
            assert seen == ["a", "a", "b"]

    asyncio.run(main())


def test_a_callback_that_throws_in_typescript_ends_its_call_only_and_no_listener_stays(tmp_path):
    conversation = """
import {{ Client }} from "{client}";
import {{ getEventListeners }} from "node:events";
const client = await Client.start({command});
const seen: unknown[] = [];
const {{ signal }} = new AbortController();
const fail = () => {{
  seen.push("called");
  throw new Error("a mistake");
}};
for (const onText of [fail, async () => fail(), (text: string) => void seen.push(text)])
  await client
    .call("texts" as any, {{}} as any, {{ onText, signal }})
    .then((found) => seen.push(found.text), (error) => seen.push(error.message));
seen.push(getEventListeners(signal, "abort").length);
await client.close();
console.log(JSON.stringify(seen));
"""
    found = run_typescript(tmp_path, conversation=conversation, command=COMMAND)
    assert found[:2] == ["called", "a mistake"]
    assert found[-4:] == ["a", "b", "ab", 0]


# The numbers of a job's events, by its name and the number before the first of them; at the end, why there are no more.
EVENTS = {
    ("resumed", 0): [1, 2, 3, 4, 5, 6, 7],
    ("resumed", 3): [4, 5, 6, 7],
    ("over", 0): [1, 2, 3, 4],
    ("over", 4): [],
    ("damaged", 3): [4, "bad_message"],
}


def test_python_client_follows_a_job_to_its_present_end():
    async def numbers(client, job, since):
        found = []
        try:
            async for event in client.events(job, since):
                found.append(event["number"])
        except ServerError as error:
            found.append(error.code)
        return found

    async def main():
        async with await Client.start(COMMAND) as client:
            return {case: await asyncio.wait_for(numbers(client, *case), 60) for case in EVENTS}

    assert asyncio.run(main()) == EVENTS


def test_typescript_client_follows_a_job_to_its_present_end(tmp_path):
    conversation = """
import {{ Client }} from "{client}";
const client = await Client.start({command});
const found: unknown[] = [];
for (const [job, since] of JSON.parse(process.argv[2])) {{
  const numbers: unknown[] = [];
  try {{
    for await (const event of client.events(job, since)) numbers.push(event.number);
  }} catch (error: any) {{
    numbers.push(error.code);
  }}
  found.push(numbers);
}}
await client.close();
console.log(JSON.stringify(found));
"""
    found = run_typescript(tmp_path, [*map(list, EVENTS)], conversation=conversation, command=COMMAND)
    assert found == list(EVENTS.values())
