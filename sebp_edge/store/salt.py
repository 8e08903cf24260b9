"""The salt of a store, and the highest version number of each name, in a file named by a salted hash of the name."""

import re
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from sebp_edge.basics.files import make_private, read_text, storage_errors, write_atomically
from sebp_edge.errors import StorageError
from sebp_edge.store.folders import NUMBER, NUMBERS

_FILE = ".salt"
_SALT = re.compile("[0-9a-f]{32}")


def read_salt(store: Path) -> bytes:
    """Returns the salt of a store, which is made at the first call; damage is a StorageError."""
    path = store / _FILE
    with storage_errors("Cannot write to", path), suppress(ValueError):
        make_private(store)
        if not path.exists():
            write_atomically(path, secrets.token_hex(16), replace=False)
        if _SALT.fullmatch(salt := read_text(path)):
            return salt.encode()
    raise StorageError(
        f"{str(path)!r} is damaged, so the numbers of removed versions are not known; restore the file, or delete "
        "it to count anew."
    )


def salt_of(digits: str) -> bytes:
    """Returns a salt from its hexadecimal digits; a ValueError if it cannot be one."""
    salt = bytes.fromhex(digits)
    if len(salt) > blake2b.MAX_KEY_SIZE:
        raise ValueError("salt")
    return salt


def read_number(store: Path, name: str) -> int:
    """Returns the highest number that a version of this name has had; 0 if it is not known."""
    path = _number_file(store, name)
    with suppress(OSError, ValueError):
        if NUMBER.fullmatch(number := read_text(path)):
            return int(number)
    return 0


def write_number(store: Path, name: str, number: int) -> None:
    """Writes the highest number that a version of this name has had; only for the holder of the store's lock."""
    path = _number_file(store, name)
    make_private(path.parent)
    write_atomically(path, str(number))


def _number_file(store: Path, name: str) -> Path:
    # Hashed, so that the names of removed adapters are not kept.
    return store / NUMBERS / blake2b(name.encode(), digest_size=16, key=read_salt(store)).hexdigest()
