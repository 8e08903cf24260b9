"""Measures how exports of notes and documents are read: the share of words, seconds, memory, silences.

    python kernels/bench/formats/note_exports.py [--notes 10000] [--record [FILE]]

Each format has a made-up file of notes, whose words are counted before they are written, with ids, comments, deleted
text and attachments to leave out. It is read in a process of its own, by which this grows; a silence is the time
between two events. Archives are not compressed.
"""

import io
import random
import re
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from formats.chat_exports import WORDS, read_apart

SOURCES = ("sebp_edge/reading", "kernels/bench/formats/chat_exports.py", __file__)
WORD = re.compile(r"\w+")
# Each note's title and paragraphs.
Notes = list[tuple[str, list[str]]]
ID = "{:032x}"
UNREAD = "unread " * 5


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--notes", type=int, default=10_000)
    options = parser.parse_args()
    notes = make_notes(options.notes)
    rows = [reading(name, write, notes) for name, write in WRITERS.items()]
    evidence.record("note-exports", SOURCES, rows, options.record, on_cpu=True)


def reading(name: str, write, notes: Notes) -> dict:
    """Returns the figures of one format; bytes and seconds of the processor."""
    expected = Counter(WORD.findall("\n".join(text for title, texts in notes for text in (title, *texts))))
    found = read_apart(name, write(notes))
    read = Counter(found.pop("word_counts"))
    row = {"file": name, "notes": len(notes), "words": expected.total(), "read_words": (expected & read).total()}
    row |= {"other_words": (read - expected).total()}
    row |= {key: found[key] for key in ("bytes", "documents", "seconds", "peak", "silence")}
    return evidence.show(row)


def make_notes(number: int, seed: int = 0) -> Notes:
    draw, known = random.Random(seed), WORDS.split()

    def text() -> str:
        return " ".join(draw.choice(known) for _ in range(draw.randint(5, 40)))

    return [(f"Note {index}", [text() for _ in range(draw.randint(1, 4))]) for index in range(number)]


def evernote(notes: Notes) -> str:
    resource = f'<resource><data encoding="base64">{"QUJD" * 200}</data><mime>image/png</mime></resource>'
    pieces = ['<!DOCTYPE en-export SYSTEM "http://xml.evernote.com/pub/evernote-export4.dtd"><en-export>']
    for index, (title, texts) in enumerate(notes):
        body = "".join(f"<div>{text}<br/></div>" for text in texts)
        body += '<en-media type="image/png" hash="a"/><en-crypt>QUJD</en-crypt>' * (index % 10 == 0)
        page = f"<?xml version='1.0'?><!DOCTYPE en-note SYSTEM 'enml2.dtd'><en-note>{body}</en-note>"
        more = f"<tag>{UNREAD}</tag>{resource * (index % 10 == 0)}"
        pieces.append(f"<note><title>{title}</title><content><![CDATA[{page}]]></content>{more}</note>")
    return "".join([*pieces, "</en-export>"])


def joplin(notes: Notes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for index, (title, texts) in enumerate(notes):
            end = f"id: {ID.format(index)}\nparent_id: \ncreated_time: 2024-01-01\nsource: {UNREAD}\ntype_: 1"
            text = "\n\n".join([title, *texts, f"![unread.png](:/{ID.format(index)})", end])
            tag = f"{UNREAD}\n\nid: {ID.format(index)}\nparent_id: \ntype_: 5"
            for name, content in (("a.md", text), ("b.md", tag), ("resources/c.md", UNREAD))[: 1 if index % 10 else 3]:
                member = tarfile.TarInfo(name)
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
    return written.getvalue()


def zipped(files: dict[str, str]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return written.getvalue()


def notion(notes: Notes) -> bytes:
    files = {f"Notes {ID.format(0)}.csv": f"Name,Status\n{UNREAD},{UNREAD}\n"}
    for index, (title, texts) in enumerate(notes):
        properties = f"Created: {UNREAD}\nStatus: {UNREAD}"
        texts = [f"# {title}", *([properties] if index % 2 else []), *texts, "![unread](a/unread.png)"]
        files[f"Notes/{title} {ID.format(index)}.md"] = "\n\n".join(texts)
    return zipped(files)


def open_document(notes: Notes) -> bytes:
    pieces = [
        '<a xmlns:office="o" xmlns:text="t"><office:text><text:tracked-changes><text:deletion>'
        f"<text:p>{UNREAD}</text:p></text:deletion></text:tracked-changes>"
    ]
    for title, texts in notes:
        comment = f"<office:annotation><text:p>{UNREAD}</text:p></office:annotation>"
        paragraphs = "".join(f'<text:p text:style-name="P1"><text:span>{text}</text:span></text:p>' for text in texts)
        pieces.append(f'<text:h text:outline-level="1">{title}{comment}</text:h>{paragraphs}')
    return zipped({"content.xml": "".join([*pieces, "</office:text></a>"])})


def rich_text(notes: Notes) -> str:
    def escaped(text: str) -> str:
        units = text.encode("utf-16-le")
        codes = (int.from_bytes(units[at : at + 2], "little", signed=True) for at in range(0, len(units), 2))
        return "".join(chr(code) if 0 < code < 128 else f"\\u{code}?" for code in codes)

    paragraphs = "".join(
        rf"\pard {{\b {title}}}{{\v {UNREAD}}}\par " + "".join(rf"{escaped(text)}\par{chr(10)}" for text in texts)
        for title, texts in notes
    )
    return rf"{{\rtf1\ansi{{\fonttbl{{\f0 Unread;}}}}{{\info{{\title {UNREAD}}}}}{paragraphs}}}"


def components(notes: Notes) -> str:
    sections = "\n\n".join("\n\n".join([f"# {title}", "<Tab a={{b: 1}}>", *texts, "</Tab>"]) for title, texts in notes)
    return f"import unread from 'unread'\n\n{sections}"


WRITERS = {
    "notes.enex": evernote,
    "notes.jex": joplin,
    "notion.zip": notion,
    "notes.odt": open_document,
    "notes.rtf": rich_text,
    "notes.mdx": components,
}

if __name__ == "__main__":
    main()
