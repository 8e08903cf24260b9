"""Damages input of every kind, and checks that each is read or refused in one sentence, in little time and memory.

    python kernels/bench/formats/fuzz.py [--inputs 10000] [--seed 0] [--record [FILE]]
    python kernels/bench/formats/fuzz.py --http [--inputs 1000] [--seed 0] [--record [FILE]]

Inputs that end otherwise are printed with their kind and number, which with the seed repeat them, and nothing is
recorded.

`--http` damages requests to `sebp-edge serve --http` while a job trains, which must go on: bodies and their values,
tokens, names of the host (as in DNS rebinding), origins, paths, and the bytes of whole requests. Then many come at
once, and some are too large. An answer that is not refused is read up to its first line; the app goes then.
"""

import http.client
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from formats import note_exports
from formats.chat_exports import WRITERS, make_messages
from formats.damage import damage, damage_bytes, damage_values
from sebp_edge import AdapterStore, Personalizer, Recipe, SebpEdgeError
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.start import latest_history
from sebp_edge.run.texts_comparison import compare_with_active
from sebp_edge.values.reading import Reading

SOURCES = ("sebp_edge", "recipes/notes.toml", *sorted(Path(__file__).parent.glob("*.py")))
# The maximum time for one input, in seconds, and the maximum length of a message, in characters.
SECONDS, LENGTH = 20, 1000
# Bytes of address space beyond what is in memory at the beginning.
MEMORY = 8_000_000_000
NOTES = evidence.ROOT / "examples" / "notes"
# The share of each kind among the inputs.
SHARES = {
    "files of texts": 0.3,
    "chats and mails": 0.15,
    "records": 0.1,
    "recipes": 0.1,
    "versions in a store": 0.2,
    "archives": 0.1,
    "weights": 0.05,
}

_WORD = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body/></w:document>'
FILES = {
    "a.md": "---\ntitle: Soup\n---\n# Soup\n\n> [!note] Lentils\n\n![[b]] [[c|d]]\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "a.txt": "The ferry left at six.\r\n" * 20,
    "a.html": "<html><head><title>x</title></head><body><p>Soup &amp; bread<ul><li>a<table><tr><td>1</table>",
    "a.org": "#+TITLE: Soup\n* TODO Lentils :food:\n  :PROPERTIES:\n  :ID: 1\n  :END:\n[[https://a.b][c]]\n",
    "a.csv": "question,answer\nWho?,Ada\nWhen?,1843\n",
    "a.tsv": "prompt\tcompletion\nWho?\tAda\n",
    "a.jsonl": '{"prompt": "Who?", "completion": "Ada"}\n{"messages": [{"role": "user", "content": "a"}]}\n',
    "a.json": '[{"instruction": "Sum up", "output": "b"}, {"conversations": [{"from": "human", "value": "a"}]}]',
    "a.ipynb": '{"cells": [{"cell_type": "markdown", "source": ["# a\\n", "b"]}], "metadata": {}, "nbformat": 4}',
    "a.mdx": "import A from 'a'\n\n# Soup\n\n<A b={1}>\n\nLentils {c}\n\n</A>\n",
    "a.rtf": "{\\rtf1\\ansi{\\fonttbl{\\f0\\fcharset0 A;}}\\f0 "
    "Soup \\'e4\\u8364?\\par{\\footnote a}\\intbl b\\cell\\row}",
    "a.fodt": "<a xmlns:o='o' xmlns:t='t'><o:body><o:text><t:h>Soup</t:h><t:list><t:list-item><t:p>Lentils</t:p>"
    "</t:list-item></t:list></o:text></o:body></a>",
    "a.enex": "<en-export><note><title>Soup</title><content><![CDATA[<en-note><en-todo/>Lentils</en-note>]]></content>"
    "</note></en-export>",
    f"a {'0' * 32}.md": "# Soup\n\nCreated: now\nTags: a\n\nLentils ![b](c/d.png)\n",
    "a.pdf": "%PDF-1.4\n1 0 obj\n<</Type/Catalog/Pages 2 0 R>>\nendobj\n2 0 obj\n<</Type/Pages/Kids[3 0 R]/Count 1>>\n"
    "endobj\n3 0 obj\n<</Type/Page/Parent 2 0 R/Contents 4 0 R>>\nendobj\n4 0 obj\n"
    "<</Length 20>>stream\nBT (Soup) Tj ET\nendstream\nendobj\ntrailer<</Root 1 0 R/Size 5>>\n%%EOF",
    ".gitignore": "*.tmp\n!a.md\n/b/**\n[a-z",
}
RECORDS = [
    {"text": "The ferry left at six.", "name": "ferry"},
    {"prompt": "Who?", "completion": "Ada"},
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada"}]},
    {"instruction": "Sum up.", "input": "Soup", "output": "Food"},
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ada"}]},
]


class Hangs(BaseException):
    """An input took too long."""


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true")
    options = parser.parse_args()
    inputs = options.inputs or (1000 if options.http else 10_000)
    warnings.simplefilter("ignore")

    def end(*_) -> None:
        raise Hangs(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    if options.http:
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as door:
            rows = fuzz_door(door, inputs, options.seed)
        report("fuzz-http", rows, options.record)
        return
    # An input that takes all memory must not take the machine's.
    resource.setrlimit(resource.RLIMIT_AS, (resident() + MEMORY, -1))
    with tempfile.TemporaryDirectory() as folder:
        kinds = make_kinds(Path(folder))
        before = resident()
        rows = [
            fuzz(name, attempt, round(SHARES[name] * inputs), options.seed, lambda: peak_resident() - before)
            for name, attempt in kinds.items()
        ]
    report("fuzz", rows, options.record)


def report(name: str, rows: list[dict], record: Path | None) -> None:
    if any(row["failed"] for row in rows):
        sys.exit("Some inputs failed.")
    evidence.record(name, SOURCES, rows, record, on_cpu=True)


def fuzz(
    name: str,
    attempt: Callable[[random.Random], None],
    number: int,
    seed: int,
    grown: Callable[[], int],
) -> dict:
    """Tries inputs of one kind; returns how many were read and refused, the slowest, and by what memory has grown."""
    refused, failed, slowest = 0, 0, 0.0
    for index in range(number):
        begin = time.perf_counter()
        signal.alarm(SECONDS)
        try:
            attempt(random.Random(f"{seed} {name} {index}"))
        except SebpEdgeError as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > LENGTH:
                failed += 1
                print(f"{name} {index}: not one sentence: {error}")
        except (Exception, Hangs):
            failed += 1
            print(f"{name} {index}: {traceback.format_exc()}")
        finally:
            signal.alarm(0)
        slowest = max(slowest, time.perf_counter() - begin)
    row = {"kind": name, "inputs": number, "read": number - refused - failed, "refused": refused, "failed": failed}
    return evidence.show(row | {"slowest": slowest, "peak": max(0, grown())})


def make_kinds(folder: Path) -> dict[str, Callable[[random.Random], None]]:
    """Makes an adapter with two versions; returns what tries one damaged input of each kind."""
    tokenizer, recipe = local_tokenizer(resolve("tiny")), Recipe.load("notes")
    texts = sorted(NOTES.rglob("*.md"))[:14]
    personalizer = Personalizer("tiny", recipe=recipe.replace(epochs=1), device="cpu", store=folder / "store")
    personalizer.adapt(texts[:-1], activate_anyway=True, keep_samples=True)
    personalizer.adapt(texts, fresh=True, activate_anyway=True, keep_samples=True)
    personalizer.store.adapter("default").export_archive(folder / "archive", with_names=True)
    reading, files = read_texts(texts), folder / "files"
    files.mkdir()
    for name, content in FILES.items():
        (files / name).write_text(content, encoding="utf-8")
    with zipfile.ZipFile(files / "a.docx", "w") as archive:
        archive.writestr("word/document.xml", _WORD)
    with zipfile.ZipFile(files / "a.odt", "w") as archive:
        archive.writestr("content.xml", FILES["a.fodt"])
    (files / "a.jex").write_bytes(note_exports.joplin([("Soup", ["Lentils"])]))

    chats = folder / "chats"
    for name, write in WRITERS.items():
        (chats / name).parent.mkdir(parents=True, exist_ok=True)
        (chats / name).write_text(write(make_messages(25)), encoding="utf-8")

    def prepare(texts) -> None:
        make_dataset(read_texts(texts, me="Anna"), tokenizer, recipe, None, Drawing(seed=0))

    return {
        "files of texts": partial(_files, files, folder / "damaged", prepare),
        "chats and mails": partial(_files, chats, folder / "damaged", prepare),
        "records": partial(_records, prepare),
        "recipes": partial(_recipe, folder / "damaged.toml"),
        "versions in a store": partial(_version, folder / "store", folder / "copy", reading, personalizer),
        "archives": partial(_archive, folder / "archive", folder / "damaged-archive", folder / "other"),
        "weights": partial(_weights, personalizer, folder / "adapter"),
    }


def _copied(source: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(source, to)


def _remove(path: Path) -> None:
    """Removes what damage has left of a file."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)


def _files(source: Path, folder: Path, prepare: Callable, draw: random.Random) -> None:
    damage(draw.choice(sorted(path for path in _copied(source, folder).rglob("*") if path.is_file())), draw)
    prepare(folder)


def _records(prepare: Callable, draw: random.Random) -> None:
    prepare([damage_values(draw.choice(RECORDS), draw), *RECORDS])


def _recipe(path: Path, draw: random.Random) -> None:
    _remove(path)
    path.write_bytes((evidence.ROOT / "recipes" / draw.choice(["notes.toml", "chat.toml"])).read_bytes())
    damage(path, draw)
    Recipe.load(path)


def _version(source: Path, folder: Path, reading: Reading, personalizer: Personalizer, draw: random.Random) -> None:
    """One file of the store is damaged, and everything that reads it is tried."""
    store = AdapterStore(_copied(source, folder))
    paths = sorted(path for path in store.folder.rglob("*") if path.suffix != ".safetensors" and path.is_file())
    damage(draw.choice([path for path in paths if path.stat().st_size]), draw)
    adapter = store.adapter("default")
    attempts = [
        lambda: [adapter.open(number) for number in adapter.versions()],
        lambda: adapter.documents(2),
        lambda: json.dumps(adapter.report(2, with_samples=True).to_dict()),
        lambda: adapter.report(2, with_samples=True).to_html(),
        lambda: adapter.diff(1, 2),
        lambda: latest_history(adapter),
        lambda: compare_with_active(store, "default", personalizer.reference, personalizer.recipe, 0, reading),
        store.garbage,
        lambda: adapter.export_archive(folder / "exported"),
        adapter.rollback,
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except SebpEdgeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _archive(source: Path, path: Path, folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _remove(path)
    shutil.copyfile(source, path)
    damage(path, draw)
    AdapterStore(folder).import_archive(path)


def _weights(personalizer: Personalizer, folder: Path, draw: random.Random) -> None:
    _copied(personalizer.store.adapter("default").open(2).path, folder)
    damage(folder / draw.choice(["adapter_model.safetensors", "adapter_config.json", "sebp_edge.json"]), draw)
    personalizer.load_adapter(folder)


# ---------------------------------------------------------------------------------------------------------------- HTTP

CHAT, RPC = "/v1/chat/completions", "/rpc"
SAID = [{"role": "user", "content": "Where is the boat?"}]
FEW = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["."], "stream": True}
REQUESTS = [
    (CHAT, {"model": "base", "messages": SAID, **FEW, "stream_options": {"include_usage": True}}),
    (CHAT, {"model": "base:ask", "messages": SAID, "stream": True}),
    ("/v1/completions", {"model": "base", "prompt": "The boat", **FEW}),
    *(
        (RPC, {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        for method, params in (
            ("generate", {"prompt": "The boat", "max_new_tokens": 2}),
            ("search", {"question": "Where is the boat?", "paths": [str(NOTES)]}),
            ("jobs.get", {"id": "training"}),
            ("jobs.subscribe", {"id": "training", "since": 0}),
            ("adapters.export", {"name": "none", "to": "/tmp/elsewhere"}),
            ("plan", {"paths": [str(NOTES)]}),
        )
    ),
]
HEADERS = [
    *({"Authorization": value} for value in ("", "Bearer", "Bearer x", "Basic eDp4", "Bearer " + "x" * 10_000)),
    *({"Host": value} for value in ("evil.example", "evil.example:{port}", "localhost", "[::1]:{port}", "127.0.0.1")),
    *({"Origin": value} for value in ("null", "https://evil.example", "http://127.0.0.1:{port}", "app://x")),
    *({"Content-Length": value} for value in ("-1", "x", "99999999999999999999")),
    *({"Transfer-Encoding": value} for value in ("chunked", "gzip, chunked", "x")),
]
PATHS = [
    "/",
    "/v1/../rpc",
    "/%2e%2e/etc/passwd",
    "//evil.example/rpc",
    "/v1/models/../../..",
    "/\x00",
    "/" + "a" * 9000,
]
AT_ONCE, LARGE = 1000, 100_000_000
REFUSED_WITH = {400, 401, 403, 404, 405, 413, 503}


class Refused(SebpEdgeError):
    """An answer is an error in OpenAI's form or JSON-RPC's."""


class Door:
    """A server, and what an app knows of it."""

    def __init__(self, process: subprocess.Popen):
        self.process, first = process, process.stdout.readline()
        port, token = re.search(r":(\d+)/v1 with the token in '(.*)'", first).groups()
        self.port, self._token = int(port), Path(token).read_text()

    def call(self, path: str, body: bytes, **changes: str) -> dict:
        """Returns the first line of an answer; raises Refused if it is an error."""
        headers = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {self._token}"}
        headers["Accept"] = "text/event-stream"
        headers |= {"Content-Length": str(len(body))} | {
            key: each.format(port=self.port) for key, each in changes.items()
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
        is_whole = not changes.keys() & {"Content-Length", "Transfer-Encoding"}
        return self.send("\r\n".join(lines).encode() + body, ends=not is_whole)

    def send(self, data: bytes, *, ends: bool) -> dict:
        """Sends bytes, and ends if so; returns the first line of the answer; raises Refused if it is an error."""
        with socket.create_connection(("127.0.0.1", self.port), SECONDS) as app:
            try:
                app.sendall(data)
                if ends:
                    app.shutdown(socket.SHUT_WR)
                answer = http.client.HTTPResponse(app)
                answer.begin()
            except (http.client.BadStatusLine, ConnectionError) as error:
                raise Refused("The connection was closed.") from error
            line = answer.readline()
        if answer.getheader("Content-Type", "").startswith("text/plain") and answer.status in (400, 503):
            raise Refused("It is no HTTP, or there are too many.")  # which is told before anything is read
        found = json.loads(line.removeprefix(b"data: "))
        if (error := found.get("error")) is None:
            assert answer.status == 200, answer.status
            return found
        assert answer.status in REFUSED_WITH or answer.status == 200, (answer.status, error)
        assert "internal" not in (error["code"], error.get("data", {}).get("code")), error
        raise Refused(error["message"])

    def state(self) -> dict:
        request = {"jsonrpc": "2.0", "id": 1, "method": "jobs.get", "params": {"id": "training"}}
        return self.call(RPC, json.dumps(request).encode())["result"]["job"]

    def memory(self) -> int:
        """Returns the resident bytes of the door and of its supervisor, which has the worker."""
        own = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (own, *own.children()))


@contextmanager
def serving(folder: Path) -> Iterator[Door]:
    """Context with a server of "tiny" and the example notes that trains all the time."""
    (folder / "long.toml").write_text("epochs = 1000\n")
    command = ("-c", "from sebp_edge.cli import main; main()", "serve", "--http", "0", "--model", "tiny")
    options = [item for each in (NOTES, folder) for item in ("--folder", str(each))]
    environment = os.environ | {"XDG_DATA_HOME": str(folder)}
    with subprocess.Popen(
        [sys.executable, *command, *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            door = Door(process)
            params = {"paths": [str(NOTES)], "device": "cpu", "recipe": str(folder / "long.toml")}
            job = {"jsonrpc": "2.0", "id": 1, "method": "jobs.start", "params": {"id": "training", "params": params}}
            door.call(RPC, json.dumps(job).encode())
            while not door.state()["progress"]:
                time.sleep(0.1)
            yield door
        finally:
            process.terminate()


def fuzz_door(door: Door, inputs: int, seed: int) -> list[dict]:
    before, began = door.memory(), door.state()

    def grown() -> int:
        return door.memory() - before

    rows = [
        fuzz("requests over HTTP", partial(_request, door), inputs, seed, grown),
        fuzz("bodies of 100 MB", lambda draw: door.call(draw.choice([CHAT, RPC]), b" " * LARGE), 4, seed, grown),
    ]
    refused, slowest = at_once(door, seed)
    found = {"inputs": AT_ONCE, "read": AT_ONCE - refused, "refused": refused, "failed": 0, "slowest": slowest}
    rows.append(evidence.show({"kind": "requests at once", **found, "peak": max(0, grown())}))
    ended = door.state()
    assert ended["state"] == "running" and ended["last_event"] > began["last_event"], ended
    return rows


def _request(door: Door, draw: random.Random) -> None:
    path, body = draw.choice(REQUESTS)
    data, headers = json.dumps(body).encode(), {}
    match draw.choices(("values", "bytes", "headers", "path", "whole"), (6, 2, 2, 1, 2))[0]:
        case "values":
            body = damage_values(body, draw)
            data = json.dumps(body).encode()
        case "bytes":
            data = damage_bytes(data, draw)
        case "headers":
            headers = draw.choice(HEADERS)
        case "path":
            path = draw.choice(PATHS)
        case "whole":
            host = f"Host: 127.0.0.1:{door.port}\r\n".encode()
            door.send(damage_bytes(b"POST %s HTTP/1.1\r\n%s\r\n%s" % (path.encode(), host, data), draw), ends=True)
            return
    door.call(path, data, **headers)


def at_once(door: Door, seed: int) -> tuple[int, float]:
    """Returns how many of many requests at once were refused, and the seconds of the slowest."""

    def one(number: int) -> tuple[bool, float]:
        begin = time.perf_counter()
        try:
            _request(door, random.Random(f"{seed} at once {number}"))
            return False, time.perf_counter() - begin
        except SebpEdgeError:
            return True, time.perf_counter() - begin

    with ThreadPoolExecutor(AT_ONCE) as apps:
        refused, seconds = zip(*apps.map(one, range(AT_ONCE)), strict=True)
    return sum(refused), max(seconds)


if __name__ == "__main__":
    main()
