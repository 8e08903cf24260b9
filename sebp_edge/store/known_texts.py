"""The file known_texts.json of a version: which texts it has learnt, as salted hashes.

It is read without numpy and torch, so that it takes no time to find that nothing has changed.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.basics.files import read_json
from sebp_edge.errors import AdapterError
from sebp_edge.store.salt import salt_of

KNOWN_TEXTS = "known_texts.json"
_FORMAT = 1
# The size limit of the file, in bytes; a text takes 60.
_MAX_BYTES = 2**29
_HASH, _KEY = re.compile("[0-9a-f]{32}"), re.compile("([0-9a-f]{16})?")


@dataclass(frozen=True)
class KnownTexts:
    """What a version has learnt.

    Attributes:
        salt: the salt of the hashes: that of the adapter's lists of documents.
        base: the digest of the base model's files.
        texts: the hash of each text of the version, with the key of its document's fingerprint in hexadecimal digits;
            without a key if it had no tokens to train on.
        gone: the same of texts that are gone, but that the version it learnt on from had.
    """

    salt: bytes
    base: str
    texts: Mapping[str, str]
    gone: Mapping[str, str]

    def still_known(self, current: Iterable[str], gone: Iterable[str]) -> dict[str, str]:
        """Returns the texts that a version which learns on from this one knows although they are gone.

        Args:
            current: the hashes of all texts that are there now.
            gone: the keys of documents that are gone, and not merely changed.
        """
        current, gone = set(current), set(gone)
        return {text: key for text, key in {**self.gone, **self.texts}.items() if text not in current and key in gone}

    def write(self, folder: Path) -> None:
        """Writes the file into the folder of a new version."""
        values = {"format": _FORMAT, "salt": self.salt.hex(), "base": self.base, "texts": self.texts, "gone": self.gone}
        (folder / KNOWN_TEXTS).write_text(json.dumps(values, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "KnownTexts | None":
        """Reads the file from a version's folder; returns None if the version has none."""
        try:
            values = read_json(folder / KNOWN_TEXTS, _MAX_BYTES)
            texts, gone = values["texts"], values["gone"]
            if values["format"] == _FORMAT and all(map(_is_valid, (texts, gone))):
                return cls(salt_of(values["salt"]), str(values["base"]), texts, gone)
        except FileNotFoundError:
            return None
        except (OSError, LookupError, TypeError, ValueError):
            pass
        raise AdapterError(f"{str(folder / KNOWN_TEXTS)!r} is damaged, or was written by a newer sebp-edge.")


def _is_valid(texts) -> bool:
    return isinstance(texts, dict) and all(
        _HASH.fullmatch(text) and isinstance(key, str) and _KEY.fullmatch(key) for text, key in texts.items()
    )
