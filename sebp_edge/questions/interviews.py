"""Interviews a model about many documents, and remembers what it wrote about each, in the adapters' store.

The files hold questions, so text of the user's. `forget` and the removal of an adapter delete them all; the next
interview deletes those that have not been read for three months.
"""

import json
import os
import random
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from sebp_edge.basics.files import make_private, read_json, storage_errors, write_atomically
from sebp_edge.questions.interview import Interview, Interviewed
from sebp_edge.questions.question import Question
from sebp_edge.texts.progress import Progress

# Questions that the model answers without the document, for each that it does not: they guard what it knows.
KNOWN_SHARE = 0.2
# The least number of questions of a document that a model answers as it wrote them, on average.
MIN_CONFIRMED = 2
# Changes with everything that changes what a model is asked.
_FORMAT = 1
# Documents that are asked about together: enough for full batches, few enough to lose little to an interruption.
_TOGETHER = 16
_UNREAD_SECONDS = 90 * 24 * 3600


@dataclass(frozen=True)
class InterviewCache:
    """What one model wrote, a file for each document.

    Attributes:
        folder: the folder, which is made when it is needed.
        salt: of the hashes of documents, which are the files' names.
        model: what tells this model from others.
    """

    folder: Path
    salt: bytes
    model: str

    def read(self, text: str) -> Interviewed | None:
        """Returns what the model wrote about a document; None if that is not known, or cannot be read."""
        path = self._path(text)
        with suppress(OSError, ValueError, LookupError, TypeError):
            values = read_json(path)
            read = Interviewed(
                *(tuple(_question(each) for each in values[key]) for key in ("questions", "known")),
                num_written=int(values["num_written"]),
            )
            os.utime(path)
            return read
        return None

    def write(self, text: str, interviewed: Interviewed) -> None:
        """Remembers what the model wrote about a document.

        Raises:
            StorageError: it cannot be written.
        """
        with storage_errors("Cannot write to", self.folder):
            make_private(self.folder)
            write_atomically(self._path(text), json.dumps(asdict(interviewed), ensure_ascii=False))

    def delete_unread(self) -> None:
        """Deletes what has not been read for three months.

        Raises:
            StorageError: the folder cannot be listed.
        """
        missing = suppress(FileNotFoundError, NotADirectoryError)
        with storage_errors("Cannot read the questions in", self.folder, ""), missing:
            for path in self.folder.iterdir():
                with suppress(OSError):
                    if path.suffix == ".json" and path.stat().st_mtime < time.time() - _UNREAD_SECONDS:
                        path.unlink()

    def _path(self, text: str) -> Path:
        content = json.dumps([_FORMAT, self.model, text]).encode()
        return self.folder / f"{blake2b(content, digest_size=16, key=self.salt).hexdigest()}.json"


def interview_about(
    texts: Mapping[int, str], interview: Interview, cache: InterviewCache, progress: Progress
) -> dict[int, Interviewed]:
    """Returns what a model wrote about each of the texts, by their numbers.

    A model that is not able to, by the documents so far, is not asked about the others, which are missing then.

    Raises:
        StorageError: the cache cannot be written.
    """
    cache.delete_unread()
    found = {text: cache.read(text) for text in texts.values()}
    unknown = [text for text, interviewed in found.items() if interviewed is None]
    progress.begin("interviewing", sum(map(len, unknown)))
    for begin in range(0, len(unknown), _TOGETHER):
        together = unknown[begin : begin + _TOGETHER]
        for text, interviewed in zip(together, interview.about(together), strict=True):
            found[text] = interviewed
            cache.write(text, interviewed)
            progress.advance(len(text))
        if not is_able([interviewed for interviewed in found.values() if interviewed is not None]):
            break
    progress.end()
    return {number: found[text] for number, text in texts.items() if found[text] is not None}


def is_able(interviewed: Collection[Interviewed]) -> bool:
    """Whether a model writes enough questions that it then answers as it wrote."""
    confirmed = sum(len(each.questions) + len(each.known) for each in interviewed)
    return confirmed >= MIN_CONFIRMED * len(interviewed)


def summary(interviewed: Mapping[int, Interviewed], seed: int) -> str:
    """Returns what a model wrote and what of it is trained on, in counts."""
    written = sum(each.num_written for each in interviewed.values())
    used = sum(map(len, to_train(interviewed, seed).values()))
    found = (
        f"The model wrote {written:,} questions about {len(interviewed):,} documents; {used:,} are used: with the "
        "document, it answered these as it wrote."
    )
    return found if is_able(interviewed.values()) else f"{found} Those are few, so it was not asked about more."


def to_train(interviewed: Mapping[int, Interviewed], seed: int) -> dict[int, list[Question]]:
    """Returns the questions to train on about each document: what the model knows already is a small part of them."""
    chosen = {number: list(each.questions) for number, each in interviewed.items()}
    known = [(number, question) for number, each in interviewed.items() for question in each.known]
    size = round(KNOWN_SHARE * sum(map(len, chosen.values())))
    for number, question in random.Random(seed).sample(known, min(size, len(known))):
        chosen[number].append(question)
    return chosen


def _question(values: dict) -> Question:
    return Question(tuple(values["wordings"]), tuple(values["kept_out"]), values["answer"])
