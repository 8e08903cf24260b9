"""Conversations with `sebp-edge serve`, as told/serve.txt has them: every message, in the order of its channel.

A channel is a request with its text and answer, a job with its events, or the lines that were no request.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from materials import write_notes, write_recipe
from placeholders import NOTES, TOLD, without_repeats

COMMAND = [sys.executable, "-c", "from sebp_edge.cli import main; main()", "serve"]
MODEL = '"model": "<work>/models/llama", "device": "cpu"'
MEANINGS = {
    "<texts>": f'"paths": ["<folder>/notes"], "recipe": "<folder>/quick.toml", {MODEL}',
    "<model>": MODEL,
    "<settings>": '"protocol": 1, "store": "<folder>/store", "folders": ["<folder>", "<work>/models"], '
    '"low_priority": false',
}
# What the answers of these methods say of a job that runs meanwhile.
VARIES = {"jobs.subscribe": ("state", "phase"), "jobs.pause": ("phase",), "jobs.cancel": ("phase",)}
STOPPED = {"paused", "cancelled"}  # jobs that are stopped at any step


class Server:
    """A server, and all that it has written by channel.

    Attributes:
        found: the channels.
        number: of the last request.
    """

    def __init__(self, log: Path):
        self.found, self.number, self._log, self._labels = {}, 0, log, {}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    def write(self, line: bytes) -> None:
        """Writes a line."""
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def send(self, label: str, method: str, params: dict) -> None:
        """Sends a request."""
        self.number += 1
        self._labels[self.number] = label
        self.found[label] = []
        self.write(json.dumps({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}).encode())

    def read(self, wanted) -> None:
        """Reads up to a message that `wanted` accepts, or else to the end."""
        for line in self._process.stdout:
            message = json.loads(line)
            params, id = message.get("params", {}), message.get("id")
            if message.get("method") == "job.event":
                channel = f"job {params['job']}"
            else:
                channel = self._labels.get(params.get("request", id), "other messages")
            self.found.setdefault(channel, []).append(message)
            if wanted(message):
                return

    def end(self) -> dict:
        """Ends the server's input; returns all that it has written."""
        self._process.stdin.close()
        self.read(lambda message: False)
        code = self._process.wait()
        return self.found | {"end of it": [code, *self._log.read_text(encoding="utf-8").splitlines()]}


def record_conversations(folder: Path, work: Path, placeholders) -> dict:
    """Returns the channels of two servers of one store, of which the second finds what the first has left."""
    write_notes(folder / "notes", NOTES)
    write_recipe(folder / "quick.toml")
    write_recipe(folder / "long.toml", epochs=8, batch_tokens=32)
    found, told = {}, (TOLD / "serve.txt").read_text(encoding="utf-8")
    for number, part in enumerate(told.split("restart\n"), start=1):
        channels = converse(part.splitlines(), folder, work)
        found |= {f"server {number}: {channel}": shown(channel, messages) for channel, messages in channels.items()}
    return placeholders.put(found)


def converse(lines: list[str], folder: Path, work: Path) -> dict:
    """Says these lines to a new server; returns all that it writes, by channel."""
    server = Server(folder / "server.log")
    for number, line in enumerate(lines, start=1):
        label, last = f"{number:03} {line}", str(server.number)
        for word, meaning in {**MEANINGS, "<folder>": str(folder), "<work>": str(work), "<last>": last}.items():
            line = line.replace(word, meaning)
        method, _, rest = line.partition(" ")
        if method == ">":
            server.write(rest.encode("latin-1"))
            server.read(lambda message: "error" in message)
        elif method == "until":
            awaited = partial(is_event, *rest.split())
            if not any(map(awaited, server.found.get(f"job {rest.split()[0]}", ()))):
                server.read(awaited)
        elif method == "send":
            server.send(label, *parse(rest))
        else:
            server.send(label, *parse(line))
            server.read(lambda message, number=server.number: message.get("id") == number)
    return server.end()


def parse(line: str) -> tuple[str, dict]:
    """Returns a request's method and parameters."""
    method, _, params = line.partition(" ")
    return method, json.loads(params or "{}")


def is_event(job: str, word: str, message: dict) -> bool:
    """Whether a message is an event of a job with this name or state."""
    params = message.get("params", {})
    event = params.get("event", {})
    return params.get("job") == job and word in (event["event"], event.get("state"))


def shown(channel: str, messages: list) -> list:
    """Returns the messages of a channel without what depends on the time at which they were told."""
    kind, name = channel.split(" ")[:2]
    if kind == "end":
        return messages
    if kind == "job":
        return job_events(name, [message["params"] for message in messages])
    answers, text = [], ""
    for message in messages:
        if message.get("method") == "text":
            text += message["params"]["text"]
            continue
        job = (message.get("result") or {}).get("job")
        if job and name in VARIES:
            job |= dict.fromkeys(VARIES[name], "<now>")
        if message.get("error", {}).get("data", {}).get("code") == "cancelled":  # before or after it has begun
            message["error"]["data"]["text"], text = "<text, if it has begun>", ""
        answers.append(message)
    return [text, *answers] if text else answers


def job_events(name: str, records: list[dict]) -> list:
    """Returns the events of a job; of one that is stopped at any step, the states and the other kinds."""
    numbers, keys = [record["number"] for record in records], {key for record in records for key in record}
    assert numbers == sorted({*numbers}), f"events of {name} are numbered {numbers}"
    events = without_repeats([record["event"] for record in records], steps=True)
    if name in STOPPED:
        states = [event for event in events if event["event"] == "state"]
        events = [*states, *(sorted({event["event"] for event in events}) if name == "paused" else ())]
    return [sorted(keys), *events]
