"""Damages input of every kind, and checks that each is read or refused in one sentence, in little time and memory.

    python kernels/bench/formats/fuzz.py [--inputs 10000] [--seed 0] [--record [FILE]]

Inputs that end otherwise are printed with their kind and number, which with the seed repeat them, and nothing is
recorded.
"""

import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from formats import note_exports
from formats.chat_exports import WRITERS, make_messages
from formats.damage import damage, damage_values
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
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    def end(*_) -> None:
        raise Hangs(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    # An input that takes all memory must not take the machine's.
    resource.setrlimit(resource.RLIMIT_AS, (resident() + MEMORY, -1))
    with tempfile.TemporaryDirectory() as folder:
        kinds = make_kinds(Path(folder))
        before = resident()
        rows = [
            fuzz(name, attempt, round(SHARES[name] * options.inputs), options.seed, before)
            for name, attempt in kinds.items()
        ]
    if any(row["failed"] for row in rows):
        sys.exit("Some inputs failed.")
    evidence.record("fuzz", SOURCES, rows, options.record, on_cpu=True)


def fuzz(name: str, attempt: Callable[[random.Random], None], number: int, seed: int, before: int) -> dict:
    """Tries inputs of one kind; returns how many were read and refused, the slowest and the peak memory."""
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
    return evidence.show(row | {"slowest": slowest, "peak": max(0, peak_resident() - before)})


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


if __name__ == "__main__":
    main()
