"""Measures how exports of chats and mails are read: the share of messages and words, seconds, memory, silences.

    python kernels/bench/formats/chat_exports.py [--messages 100000] [--record [FILE]]

Each format has a made-up export, counted before it is written, with messages, quotes and signatures to leave out. It is
read in a process of its own, up to the documents, by which this grows; a silence is the time between two events.
"""

import json
import random
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence

SOURCES = ("sebp_edge/reading", __file__)
WORDS = "the plum tree and bread with coffee 🙂 größer вечер 今日は there you hour boat see today waited under"
READ = """
import json, re, sys, time
from collections import Counter
from pathlib import Path

from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.values.preparation_progress import Progress
from sebp_edge.reading.readers import read_all, read_texts

times = [time.monotonic()]
before, begun = resident(), time.process_time()
reading = read_all(Path(sys.argv[1]), progress=Progress(lambda event: times.append(time.monotonic())))
documents = read_texts(reading, me="Anna").documents if reading.authors else reading.documents
seconds, peak = time.process_time() - begun, peak_resident() - before
times.append(time.monotonic())
messages, words = (sum(getattr(author, name) for author in reading.authors) for name in ("num_messages", "num_words"))
print(json.dumps({
    "read_messages": messages, "read_words": words, "documents": len(documents), "seconds": seconds, "peak": peak,
    "silence": max(b - a for a, b in zip(times, times[1:])),
    "word_counts": Counter(word for document in documents for word in re.findall(r"\\w+", document.own_text)),
}))
"""
Said = list[tuple[str, datetime, str]]


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    options = parser.parse_args()
    said = make_messages(options.messages)
    rows = [reading(name, write, said) for name, write in WRITERS.items()]
    evidence.record("chat-exports", SOURCES, rows, options.record, on_cpu=True)


def reading(name: str, write, said: Said) -> dict:
    """Returns the figures of one format; bytes and seconds of the processor."""
    found = read_apart(name, write(said))
    del found["word_counts"]
    words = sum(len(text.split()) for *_, text in said)
    return evidence.show({"export": name, "messages": len(said), "words": words} | found)


def read_apart(name: str, content: str | bytes) -> dict:
    """Writes a file and reads it in a process of its own; returns the size, what was read, and what that took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
        return {"bytes": path.stat().st_size, **json.loads(done.stdout)}


def make_messages(number: int, seed: int = 0) -> Said:
    """Returns messages of two people, some minutes apart; of ten, one has two lines."""
    draw, time, said, known = random.Random(seed), datetime(2020, 1, 1), [], WORDS.split()
    for index in range(number):
        time += timedelta(minutes=draw.randint(1, 40))
        words = " ".join(draw.choice(known) for _ in range(draw.randint(1, 20)))
        said.append((draw.choice(("Anna", "Bob")), time, f"{words}\nand {index}" if index % 10 == 0 else words))
    return said


def whatsapp(said: Said) -> str:
    lines = []
    for index, (author, time, text) in enumerate(said):
        lines.append(f"{time:%d/%m/%Y, %H:%M} - {author}: {text}")
        if index % 20 == 0:
            lines.append(f"{time:%d/%m/%Y, %H:%M} - {author}: <Media omitted>")
    return "\n".join(lines)


def chatgpt(said: Said) -> str:
    """Conversations of 20 messages, each with a branch that was not shown."""
    conversations = []
    for begin in range(0, len(said), 20):
        mapping = {}
        for index, (author, time, text) in enumerate(said[begin : begin + 20]):
            role = "user" if author == "Anna" else "assistant"
            message = {"id": str(index), "author": {"role": role, "metadata": {}}, "weight": 1.0, "status": "done"}
            message |= {"create_time": time.timestamp(), "content": {"content_type": "text", "parts": [text]}}
            mapping[str(index)] = {"id": str(index), "message": message, "parent": str(index - 1) if index else None}
        mapping["other"] = mapping["0"] | {"id": "other"}
        conversations.append({"title": "T", "mapping": mapping, "current_node": str(index), "id": f"{begin:08}-1"})
    return json.dumps(conversations)


def telegram(said: Said) -> str:
    messages = []
    for index, (author, time, text) in enumerate(said):
        message = {"id": index, "type": "message", "date": time.isoformat(), "date_unixtime": f"{time.timestamp():.0f}"}
        message |= {"from": author, "from_id": f"user{len(author)}", "text": text}
        messages.append(message | {"text_entities": [{"type": "plain", "text": text}]})
        if index % 20 == 0:
            messages.append(message | {"photo": "a.jpg", "text": "", "text_entities": []})
    return json.dumps({"type": "personal_chat", "id": 1, "messages": messages}, ensure_ascii=False, indent=1)


def slack(said: Said) -> str:
    messages = [
        {"type": "message", "user": author, "text": text, "ts": f"{time.timestamp():.0f}.000100", "team": "T1"}
        for author, time, text in said
    ]
    return json.dumps(
        messages + [{"type": "message", "subtype": "channel_join", "ts": "1.0"}] * (len(said) // 20), indent=4
    )


def discord(said: Said) -> str:
    return json.dumps([{"Timestamp": f"{time:%Y-%m-%d %X}", "Contents": text} for _, time, text in reversed(said)])


def mailbox(said: Said) -> str:
    mails, before = [], ""
    for index, (author, time, text) in enumerate(said):
        headers = f"From: {author} <{author}@example.org>\nDate: {time:%a, %d %b %Y %H:%M:%S} +0100\n"
        headers += f"Message-ID: <{index}@x>\nIn-Reply-To: <{index - 1}@x>\nContent-Type: text/plain; charset=utf-8\n"
        quote = before.replace("\n", "\n> ")
        mails.append(f"From x\n{headers}\n{text}\n\nOn 1 Jan 2020 at 10:00, Bob wrote:\n> {quote}\n\n-- \n{author}\n\n")
        before = text
    return "".join(mails)


WRITERS = {
    "_chat.txt": whatsapp,
    "conversations.json": chatgpt,
    "result.json": telegram,
    "channel/day.json": slack,
    "c1/messages.json": discord,
    "mail.mbox": mailbox,
}

if __name__ == "__main__":
    main()
