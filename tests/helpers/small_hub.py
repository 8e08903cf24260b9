"""A small Hub on this machine, over real HTTP."""

import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """Responds like the Hub. Every repository has `files`, except those whose names select a refusal."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests = []
        self.is_slow = threading.Event()  # whether weights stop half-way, until it is cleared
        self.tokens = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        if self.path != "/api/agent-harnesses":  # huggingface_hub's own; see its utils/_detect_agent.py
            self.server.requests.append(self.path)
            self.server.tokens.add(self.headers.get("Authorization"))
        refusals = {
            "gated": (401, "GatedRepo", "Access to this model is restricted."),
            "waiting": (403, "GatedRepo", "Your request to access this model is awaiting a review."),
            "nothing": (401, "RepoNotFound", "Repository not found"),
            "forbidden": (403, None, "Enable access to public gated repositories in the token's settings."),
            "bad-token": (401, None, "Invalid credentials in Authorization header"),
            "down": (502, None, "Bad gateway"),
            "no-config": (404, "EntryNotFound", "Entry not found"),
        }
        name = self.path.removeprefix("/api/models").split("/")[2]
        if name == "dropped":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif name in refusals:
            self._refuse(*refusals[name])
        elif self.path.startswith("/api/models"):
            self._answer(json.dumps(self._listing()).encode())
        elif (file := self.path.split("/")[-1]) in self.server.files:
            self._answer(self.server.files[file])
        else:
            self._refuse(404, "EntryNotFound", "Entry not found")

    do_GET = do_HEAD

    def _listing(self):
        files = self.server.files
        if "/tree/" in self.path:
            return [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        return {"id": "org/model", "sha": SHA, "siblings": siblings}

    def _refuse(self, status, code, message):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, data: bytes):
        self.send_response(200)
        for name, value in {
            "ETag": f'"{abs(hash(data)):x}"',
            "X-Repo-Commit": SHA,
            "Content-Length": len(data),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "GET":
            return
        half = len(data) // 2 if self.path.endswith(".safetensors") else 0
        self.wfile.write(data[:half])
        while half and self.server.is_slow.is_set():
            time.sleep(0.01)
        with suppress(ConnectionError):  # a client that was killed
            self.wfile.write(data[half:])

    def log_message(self, *arguments):
        pass


@contextmanager
def open_hub(folder):
    """Context with a Hub whose repositories have the files of a folder."""
    hub = SmallHub({path.name: path.read_bytes() for path in folder.iterdir()})
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))  # at the end, it is waited for so long
    thread.start()
    yield hub
    hub.is_slow.clear()
    hub.shutdown()
    thread.join()
    hub.server_close()
