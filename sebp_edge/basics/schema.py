"""The JSON Schema of all messages, which `tests/helpers/message_schema.py` writes from the classes."""

import hashlib
from importlib.resources import files


def read_schema() -> bytes:
    """Returns the JSON Schema of all messages, as UTF-8."""
    return files("sebp_edge.basics").joinpath("schema.json").read_bytes()


def schema_hash() -> str:
    """Returns the SHA-256 hash of the JSON Schema, in hexadecimal digits."""
    return hashlib.sha256(read_schema()).hexdigest()
