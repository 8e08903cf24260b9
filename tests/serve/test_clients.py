"""The clients: in Python, in TypeScript, and the guide's conversation in plain lines."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import RECIPE
from served import SECONDS, all_gone, processes_below
from typescript import run_typescript

from sebp_edge.serve.client import Client, ServerError

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_python_client_is_refused_with_code_and_hint(settings):
    async def main():
        async with await Client.start(**settings) as client:
            with pytest.raises(ServerError, match="There is no job") as caught:
                await client.call("jobs.get", id="nobody")
            assert (caught.value.code, caught.value.retry) == ("unknown_job", False)
            assert caught.value.hint
            with pytest.raises(ServerError) as caught:
                await Client.start(**settings)
            assert caught.value.code == "store_in_use"
            assert await client.call("jobs.list") == {"jobs": []}
            processes = processes_below(client.process.pid)
            client.process.kill()
            with pytest.raises(ServerError, match="has ended"):
                await client.call("ping")
        assert all_gone(processes)

    asyncio.run(main())


@pytest.mark.slow
def test_python_client_starts_a_job_and_cancels_a_request(settings, too_little, warm_servers):
    async def main():
        async with await Client.start(warm_servers.command, **settings) as client:
            await client.call("jobs.start", id="first", params=too_little)
            numbers = [event["number"] async for event in client.events("first")]
            assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3
            left = client.events("first")
            assert (await anext(left))["number"] == 1
            assert [event["number"] async for event in client.events("first")] == numbers
            await left.aclose()  # later than another iteration has ended
            texts = []
            answer = await client.call("generate", prompt="the", device="cpu", max_new_tokens=4, on_text=texts.append)
            assert "".join(texts) == answer["text"]
            begun = asyncio.Event()
            long = {"max_new_tokens": 1000, "on_text": lambda text: begun.set()}
            task = asyncio.create_task(client.call("generate", prompt="the", device="cpu", **long))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.call("ping") == {}
        assert client.process.returncode == 0

    asyncio.run(main())


# A server whose first subscription still sends when the second begins.
LATE = r"""
import json, sys

def send(**message):
    print(json.dumps(message), flush=True)

def event(number):
    event = {"event": "state", "state": "done"} if number == 3 else {"event": "any"}
    send(method="job.event", params={"job": "first", "number": number, "event": event})

subscriptions = 0
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "jobs.subscribe":
        subscriptions += 1
        if subscriptions == 2:
            event(2)
        send(id=request["id"], result={})
        for number in [1] if subscriptions == 1 else [1, 2, 3]:
            event(number)
    else:
        send(id=request["id"], result={})
"""


def test_python_client_gives_each_iteration_each_event_once_though_subscriptions_take_each_others_place():
    async def main():
        async with await Client.start((sys.executable, "-c", LATE)) as client:
            left = client.events("first")
            assert (await anext(left))["number"] == 1
            assert [event["number"] async for event in client.events("first")] == [1, 2, 3]
            assert [event["number"] async for event in left] == [2, 3]
            killed = client.events("first")
            client.process.kill()
            with pytest.raises(ServerError, match="has ended"):
                [event async for event in killed]

    asyncio.run(main())


def test_typescript_client_leaves_out_events_of_an_earlier_subscription_whose_iteration_ends(tmp_path):
    conversation = """
import {{ Client }} from "{client}";
const client = await Client.start({command});
const seen: number[] = [];
const ended: unknown[] = [];
const left = client.events("first");
await left.next();
const rest = (async () => {{
  for await (const event of left) ended.push(event.number);
}})().catch((error) => ended.push(error.code));
for await (const event of client.events("first")) seen.push(event.number);
await rest;
await client.close();
console.log(JSON.stringify([seen, ended]));
"""
    seen, ended = run_typescript(tmp_path, conversation=conversation, command=[sys.executable, "-c", LATE])
    assert (seen, ended) == ([1, 2, 3], [2, "superseded"])


CONVERSATION = """
import {{ Client, ServerError }} from "{client}";
const [settings, job] = process.argv.slice(2).map((each) => JSON.parse(each));
const client = await Client.start({command}, settings);
const seen: unknown[] = [];
try {{
  await client.call("jobs.get", {{ id: "nobody" }});
}} catch (error) {{
  if (error instanceof ServerError) seen.push(error.code);
}}
seen.push(Object.keys(await client.call("jobs.list")));
await client.call("jobs.start", {{ id: "first", params: job }});
let last = 0;
for await (const event of client.events("first")) {{
  if (event.number !== ++last) throw new Error("an event is missing");
  if (event.event.state !== undefined) seen.push(event.event.state);
}}
let text = "";
const params = {{ prompt: "the", model: job.model, device: "cpu", max_new_tokens: 4 }};
const answer = await client.call("generate", params, {{ onText: (chunk) => (text += chunk) }});
seen.push(answer.text === text);
const controller = new AbortController();
const long = client.call("generate", {{ ...params, max_new_tokens: 100 }}, {{ signal: controller.signal }});
controller.abort();
await long.catch((error) => seen.push(error.code));
await client.close();
console.log(JSON.stringify(seen));
"""


@pytest.mark.slow
def test_typescript_client_is_refused_starts_a_job_and_cancels_a_request(tmp_path, settings, too_little, warm_servers):
    command = warm_servers.command
    found = run_typescript(tmp_path, settings, too_little, conversation=CONVERSATION, command=command)
    assert found == ["unknown_job", ["jobs"], "queued", "starting", "running", "refused", True, "cancelled"]


@pytest.mark.slow
def test_the_guides_conversation_in_plain_lines_works(settings, training, warm_servers):
    """In any other language, an app writes and reads these lines."""
    Path(training["recipe"]).write_text(RECIPE + "refit = false\n")
    guide = (ROOT / "sebp_edge/guide/server.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# A conversation.*?)```", guide, re.DOTALL)
    assert len(code.splitlines()) <= 20
    code = code.replace('["sebp-edge", "serve"]', repr(warm_servers.command))
    code = code.replace('"folders": ["/home/me/notes"]', f'"store": {settings["store"]!r}, "folders": ["/"]')
    code = code.replace('"/home/me/notes"', repr(training["paths"][0]))
    code = code.replace(
        '"name": "notes", "model": "tiny"', f'"model": {training["model"]!r}, "recipe": {training["recipe"]!r}'
    )
    code = code.replace('"model": "tiny"', f'"model": {training["model"]!r}')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3 * SECONDS)
    assert done.returncode == 0, done.stderr
    assert "'id': 4, 'result': {'text':" in done.stdout
    assert "'state': 'done'" in done.stdout
