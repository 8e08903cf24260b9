"""Measures how exports of chats and mails are read: the share of messages and words, time, and memory.

    python kernels/bench/formats/chat_exports.py [--messages 100000] [--record [FILE]]

Each format has a made-up export with a share of what is to be left out. What is to be read is counted when it is made.
Each is read in a process of its own, up to the documents. Peak memory is what the process grows by, beside the size of
the file; a silence is the longest time between two events.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence

SOURCES = ("sebp_edge/texts", __file__)
WORDS = [
    "the",
    "plum",
    "tree",
    "and",
    "bread",
    "with",
    "coffee",
    "🙂",
    "größer",
    "вечер",
    "今日は",
    "there",
    "you",
    "hour",
    "boat",
    "see",
    "today",
    "waited",
    "under",
    "old",
]
READ = """
import json, sys, time
from pathlib import Path

from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.texts.progress import Progress
from sebp_edge.texts.readers import read_all, read_texts

last, silence = time.monotonic(), 0.0

def sink(event):
    global last, silence
    now = time.monotonic()
    silence, last = max(silence, now - last), now

start, before = time.monotonic(), resident()
reading = read_all(Path(sys.argv[1]), progress=Progress(sink))
messages, words = (sum(getattr(author, name) for author in reading.authors) for name in ("num_messages", "num_words"))
silence = max(silence, time.monotonic() - last)
read = time.monotonic() - start
documents = len(read_texts(reading, me="Anna").documents)
print(json.dumps({
    "messages": messages, "words": words, "documents": documents, "seconds_to_read": read,
    "seconds": time.monotonic() - start, "peak": peak_resident() - before, "silence": silence,
}))
"""
Said = list[tuple[str, datetime, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    rows = [reading(name, options.messages) for name in WRITERS]
    if options.record:
        evidence.record("chat-exports", SOURCES, rows, options.record, on_cpu=True)


def reading(name: str, number: int) -> dict:
    """Returns the figures of one format; bytes and seconds."""
    said = make_messages(number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.parent.mkdir(exist_ok=True)
        counted = WRITERS[name](said, path)
        size = path.stat().st_size
        command = [sys.executable, "-c", READ, str(path)]
        figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shares = {
        "share_of_messages": figures["messages"] / len(counted),
        "share_of_words": figures["words"] / sum(len(text.split()) for text in counted),
    }
    print(
        f"{name:24}{size / 1e6:6.1f} MB, {shares['share_of_messages']:.2%} of the messages, "
        f"{shares['share_of_words']:.2%} of the words, {figures['seconds']:.1f} s, {figures['peak'] / size:.1f} x the "
        f"file, longest silence {figures['silence']:.1f} s",
        flush=True,
    )
    return {"format": name, "bytes": size, **figures, **shares}


def make_messages(number: int, seed: int = 0) -> Said:
    """Returns messages of two people, some minutes apart; of ten, one has two lines."""
    draw, time, said = random.Random(seed), datetime(2020, 1, 1), []
    for index in range(number):
        time += timedelta(minutes=draw.randint(1, 40))
        words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 20)))
        said.append((draw.choice(("Anna", "Bob")), time, f"{words}\nand {index}" if index % 10 == 0 else words))
    return said


def write_whatsapp(said: Said, path: Path) -> list[str]:
    """Writes the file; every twentieth message is an attachment or a system line. Returns the texts to read."""
    lines = []
    for index, (author, time, text) in enumerate(said):
        begin = f"{time:%d/%m/%Y}, {time:%H:%M} - "
        lines.append(f"{begin}{author}: {text}")
        if index % 20 == 0:
            lines.append(begin + (f"{author}: <Media omitted>" if index % 40 else "Bob changed this group's icon"))
    path.write_text("\n".join(lines), encoding="utf-8")
    return [text for *_, text in said]


def write_chatgpt(said: Said, path: Path) -> list[str]:
    """Writes conversations of 20 messages, each with a branch that was not shown."""
    conversations = []
    for begin in range(0, len(said), 20):
        mapping = {"root": {"id": "root", "message": None, "parent": None, "children": ["0"]}}
        for index, (author, time, text) in enumerate(said[begin : begin + 20]):
            content = {"content_type": "text", "parts": [text]}
            role, metadata = "user" if author == "Anna" else "assistant", {"model_slug": "gpt-4", "finish": "stop"}
            message = {"id": str(index), "author": {"role": role, "name": None, "metadata": {}}, "recipient": "all"}
            message |= {"create_time": time.timestamp(), "content": content, "weight": 1.0, "metadata": metadata}
            parent = str(index - 1) if index else "root"
            mapping[str(index)] = {"id": str(index), "message": message, "parent": parent, "children": []}
        mapping["other"] = mapping["0"] | {"id": "other"}
        conversations.append({"title": "T", "mapping": mapping, "current_node": str(index), "id": f"{begin:08}-1"})
    path.write_text(json.dumps(conversations), encoding="utf-8")
    return [text for *_, text in said]


def write_telegram(said: Said, path: Path) -> list[str]:
    """Writes one chat, in which every twentieth message is a picture without words."""
    messages = []
    for index, (author, time, text) in enumerate(said):
        base = {"id": index, "type": "message", "date": time.isoformat(), "date_unixtime": str(int(time.timestamp()))}
        base |= {"from": author, "from_id": f"user{len(author)}"}
        messages.append(base | {"text": text, "text_entities": [{"type": "plain", "text": text}]})
        if index % 20 == 0:
            messages.append(base | {"photo": "a.jpg", "text": "", "text_entities": []})
    chat = {"name": "Bob", "type": "personal_chat", "id": 1, "messages": messages}
    path.write_text(json.dumps(chat, ensure_ascii=False, indent=1), encoding="utf-8")
    return [text for *_, text in said]


def write_slack(said: Said, path: Path) -> list[str]:
    """Writes one long day of a channel."""
    messages = [
        {"type": "message", "user": author, "text": text, "ts": f"{int(time.timestamp())}.000100", "team": "T1"}
        for author, time, text in said
    ]
    path.write_text(json.dumps(messages, indent=4), encoding="utf-8")
    return [text for *_, text in said]


def write_discord(said: Said, path: Path) -> list[str]:
    """Writes the owner's messages, the last one first."""
    rows = [
        {"ID": 1, "Timestamp": f"{time:%Y-%m-%d %H:%M:%S}", "Contents": text, "Attachments": ""}
        for _, time, text in said
    ]
    path.write_text(json.dumps(rows[::-1]), encoding="utf-8")
    return [text for *_, text in said]


def write_mailbox(said: Said, path: Path) -> list[str]:
    """Writes mails, each with a quote of the one before and a signature."""
    with path.open("w", encoding="utf-8") as file:
        before = ""
        for index, (author, time, text) in enumerate(said):
            headers = f"From: {author} <{author.lower()}@example.org>\nDate: {time:%a, %d %b %Y %H:%M:%S} +0100\n"
            headers += (
                f"Message-ID: <{index}@x>\nIn-Reply-To: <{index - 1}@x>\nContent-Type: text/plain; charset=utf-8\n"
            )
            quote = "".join(f"> {line}\n" for line in before.split("\n"))
            file.write(f"From x\n{headers}\n{text}\n\nOn 1 Jan 2020 at 10:00, Bob wrote:\n{quote}\n-- \n{author}\n\n")
            before = text
    # Each mail is also what the next one answers, if that is by another person.
    return [text for *_, text in said]


WRITERS = {
    "_chat.txt": write_whatsapp,
    "conversations.json": write_chatgpt,
    "result.json": write_telegram,
    "channel/day.json": write_slack,
    "c1/messages.json": write_discord,
    "mail.mbox": write_mailbox,
}

if __name__ == "__main__":
    main()
