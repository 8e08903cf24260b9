"""The door: listens on this machine only, lets in who has the token, and ends with the supervisor."""

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route

from sebp_edge.basics.files import make_private, read_text, storage_errors, write_atomically
from sebp_edge.basics.interruptions import SIGNALS
from sebp_edge.errors import MachineError, OptionError, StorageError
from sebp_edge.serve.client import Client, ServerError
from sebp_edge.serve.http.openai_api import OpenAi, answering, in_form, no_such_path
from sebp_edge.serve.http.rpc import Rpc
from sebp_edge.serve.http.streaming import to_json
from sebp_edge.serve.messages import Refusal
from sebp_edge.serve.processes import MAX_REQUESTS
from sebp_edge.serve.streams import JsonRpcOutbox, Lines
from sebp_edge.store.adapter_store import AdapterStore

__all__ = ["open_endpoint"]

HOST = "127.0.0.1"
_TOKEN_BYTES = 32
# Apps that do not read have so many seconds at the end.
_SECONDS_TO_END = 1


def read_token(path: Path) -> str:
    """Returns the token in a file that only its owner can read, which is made at the first call."""
    with storage_errors("Cannot write to", path):
        make_private(path.parent)
        if not path.exists():
            write_atomically(path, secrets.token_urlsafe(_TOKEN_BYTES), replace=False)
        found, token = path.stat(), read_text(path).strip()
    if os.name != "nt" and (found.st_mode & 0o077 or found.st_uid != os.getuid()):
        raise StorageError(f"Others than you can read {str(path)!r}; delete it, and a new token is made.")
    if len(token) < _TOKEN_BYTES or not token.isascii():
        raise StorageError(f"{str(path)!r} is damaged; delete it, and a new token is made.")
    return token


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on this machine only; 0 takes any free port."""
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, each small message waits 40 ms.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name != "nt":  # there it would let two programs listen
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(MAX_REQUESTS)
    except OSError as error:
        listening.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise OptionError(f"Port {port} {why}; give another one: --http PORT.") from error
    return listening


class Guard:
    """Refuses pages that have found this server, also under a name of their own, and programs without the token.

    Args:
        names: what apps may call this server.
        origins: of the pages that may use it.
    """

    def __init__(self, app, token: str, names: set[str], origins: Sequence[str]):
        self._app, self._names, self._origins = app, names, {*origins}
        self._credentials = f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send) -> None:
        """Lets a request in, or refuses it."""
        headers = Request(scope).headers
        given = headers.get("authorization", "").encode("latin-1")
        if headers.get("host") not in self._names:
            why = Refusal("forbidden", f"This server has another name: call it by {HOST}.")
        elif headers.get("origin", "") not in {"", *self._origins}:
            why = Refusal("forbidden", "Pages of this origin may not use this server; --origin lets them in.")
        elif not secrets.compare_digest(given, self._credentials):
            why = Refusal("invalid_api_key", "The token is missing or wrong; it is in the file that the server names.")
        else:
            await self._app(scope, receive, send)
            return
        await to_json(*in_form(why))(scope, receive, send)


class _Server(uvicorn.Server):
    """Serves an app quietly, until `should_exit`."""

    def __init__(self, app):
        quiet = {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False}
        quiet |= {"ws": "none", "lifespan": "off", "timeout_graceful_shutdown": _SECONDS_TO_END}
        super().__init__(uvicorn.Config(app, http="h11", loop="asyncio", **quiet))

    @contextmanager
    def capture_signals(self):
        """Leaves signals to `_serve`, which ends the supervisor first."""
        yield


@asynccontextmanager
async def open_endpoint(
    client: Client, store: Path, model: str, port: int = 0, origins: Sequence[str] = (), without: Sequence[str] = ()
) -> AsyncIterator[tuple[str, Path]]:
    """Context in which other apps on this machine use the server of a client, too, by HTTP.

    Yields the base URL of OpenAI's protocol, and the file with the token.

    Args:
        store: the server's, whose folder has the token.
        model: the base model.
        port: 0 takes any free port.
        origins, without: see `Guard` and `OpenAi`.

    Raises:
        OptionError: another program listens there, or the system refuses the port.
        StorageError: the file with the token is damaged, others can read it, or it cannot be written.
    """
    token = read_token(path := store / "http-token")
    with listen(port) as listening:
        port = listening.getsockname()[1]
        routes = OpenAi(client, AdapterStore(store), model, without).routes()
        routes.append(Route("/rpc", answering(Rpc(client).answer), methods=["POST"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: no_such_path})
        app = Guard(app, token, {f"{name}:{port}" for name in (HOST, "localhost")}, origins)
        if origins:
            app = CORSMiddleware(app, origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        server = _Server(app)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://{HOST}:{port}/v1", path
        finally:
            server.should_exit = True
            await serving


def run(port: int, folders: Sequence[Path], model: str, origins: Sequence[str]) -> None:
    """Serves apps on this machine until a signal ends it.

    Args:
        folders: those that questions are answered from; the app that starts this process may change them later.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # which warns of apps that go while they are answered
    try:
        asyncio.run(_serve(port, folders, model, origins))
    except ServerError as error:
        raise MachineError(str(error)) from error


async def _serve(port: int, folders: Sequence[Path], model: str, origins: Sequence[str]) -> None:
    stopped, store = _stop_at_signals(), AdapterStore().folder.parent
    folders = [str(folder.absolute()) for folder in folders]
    # A model in a folder or a file is read there, too; the server runs in another folder.
    own = [str(Path(model).absolute())] if Path(model).exists() else []
    async with (
        await Client.start(folders=[*folders, *own], store=str(store)) as client,
        open_endpoint(client, store, own[0] if own else model, port, origins, own) as (address, token),
    ):
        print(f"Serving apps at {address} with the token in {str(token)!r}.", flush=True)
        if not os.isatty(0):  # which is a person's, and stops a process in the background that reads it
            _hear_starter(client)
        ends = {asyncio.create_task(stopped.wait()), asyncio.create_task(client.process.wait())}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        is_broken = client.process.returncode not in (None, 0)
        await client.close()  # so that the streams that are open say so
    if is_broken:
        raise MachineError("The server has ended unexpectedly.")


def _hear_starter(client: Client) -> None:
    """Answers the app that started this process, in a thread that reads its lines."""
    loop, rpc, answers = asyncio.get_running_loop(), Rpc(client), JsonRpcOutbox(os.dup(1), lambda: None)
    lines = Lines(os.dup(0), answers)

    def read() -> None:
        with suppress(RuntimeError):  # the loop has ended
            for line in lines:
                answers.send(asyncio.run_coroutine_threadsafe(rpc.answer_starter(line), loop).result())
                lines.handled()

    threading.Thread(target=read, daemon=True).start()


def _stop_at_signals() -> asyncio.Event:
    """Returns what is set once a signal wants this process to end."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def stop(*_) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stopped.set)

    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGHUP under nohup
            signal.signal(signum, stop)
    return stopped
