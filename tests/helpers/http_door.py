"""Starts `sebp-edge serve --http` for tests, and speaks with it as apps do."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from command import CODE, start
from served import SECONDS, WarmServers, environment

SERVING = re.compile(r"Serving apps at http://127\.0\.0\.1:(\d+)/v1 with the token in '(.*)'\.\n")


class Door:
    """A server as an app sees it.

    Attributes:
        process: the server.
        servers: what it has started to answer.
        port, token: what the app is given.
        file: the token's.
    """

    def __init__(self, process, servers=()):
        self.process, self.servers = process, servers
        port, file = SERVING.fullmatch(process.stdout.readline()).groups()
        self.port, self.file = int(port), Path(file)
        self.token = self.file.read_text()
        self.address = f"http://127.0.0.1:{self.port}/v1"

    def send(self, method, path, body=None, **headers):
        """Sends a request; returns the connection, whose answer nobody has read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"Authorization": f"Bearer {self.token}"} | {key.replace("_", "-"): headers[key] for key in headers}
        connection.request(method, path, body, {key: value for key, value in headers.items() if value is not None})
        return connection

    def call(self, method, path, body=None, **headers):
        """Returns the status of an answer, and its JSON."""
        connection = self.send(method, path, json.dumps(body) if isinstance(body, dict) else body, **headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    def chat(self, **body):
        return self.call("POST", "/v1/chat/completions", {"model": "base", "messages": HELLO} | body)

    def rpc(self, method, **params):
        """Returns the result of a method of the protocol's, or its error."""
        status, message = self.call("POST", "/rpc", {"jsonrpc": "2.0", "id": "a", "method": method, "params": params})
        assert (status, message["id"]) == (200, "a")
        return message.get("result", message.get("error"))

    def stream(self, path, body, **headers):
        """Yields the messages of an answer as they come."""
        connection = self.send("POST", path, json.dumps(body), **headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
        connection.close()

    def follow(self, job, since=0):
        """Yields the answer to a subscription, and the events."""
        params = {"id": job, "since": since}
        yield from self.stream("/rpc", {"jsonrpc": "2.0", "id": 7, "method": "jobs.subscribe", "params": params})

    def end(self, signum=signal.SIGINT):
        """Ends it by a signal; returns its exit code and all that it wrote since its first line."""
        self.process.send_signal(signum)
        output, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output + errors


HELLO = [{"role": "user", "content": "the boat"}]


@contextmanager
def open_door_of_notes(data, store_of_notes, model_folder, *options):
    """Context with a server that has an adapter "default" and answers from a folder with a note."""
    shutil.copytree(store_of_notes.folder, data / "sebp-edge" / "adapters")
    (data / "keys").mkdir()
    (data / "keys" / "shed.md").write_text("# Keys\n\nThe key of the shed hangs behind the green door.\n")
    with open_door(data, "--model", model_folder, "--folder", data / "keys", *options) as door:
        yield door


@contextmanager
def open_door(data, *options, stdin=subprocess.DEVNULL):
    """Context with a server that has its own data folder, and warm processes.

    Args:
        stdin: its standard input, on which the app that starts it can speak.
    """
    with WarmServers() as servers:
        code = f"import sebp_edge.serve.client as client; client.command_of = lambda *_: {servers.command}\n"
        arguments = [code + CODE, "serve", "--http", "0", *map(str, options)]
        with start(arguments, stdin=stdin, env=environment(XDG_DATA_HOME=str(data))) as process:
            try:
                yield Door(process, servers.started)
            finally:
                process.kill()
                process.wait(SECONDS)
                left = "" if process.stderr.closed else process.stderr.read()
        assert "Traceback" not in left, left
        print(left, file=sys.stderr)
