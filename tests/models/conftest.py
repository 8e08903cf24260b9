"""A small Hub on this machine, over real HTTP, and huggingface_hub's cache."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(ThreadingHTTPServer):
    """Responds like the Hub. Every repository has `files`, except those whose names select a refusal."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests = []
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
        return {"id": "org/model", "sha": SHA, "siblings": [{"rfilename": name} for name in files]}

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
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def small_hub(model_folder):
    hub = SmallHub({path.name: path.read_bytes() for path in model_folder.iterdir()})
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))  # at the end, it is waited for so long
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def put_into_cache():
    """A function that writes files like huggingface_hub: blobs, and a snapshot of links to them."""

    def put(home, repository, files):
        folder = home / "hub" / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / SHA
        for part in (folder / "blobs", folder / "refs", snapshot):
            part.mkdir(parents=True)
        (folder / "refs" / "main").write_text(SHA)
        for name, data in files.items():
            (folder / "blobs" / f"blob-{name}").write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
        return snapshot

    return put
