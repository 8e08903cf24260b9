"""Reads GGUF files from untrusted sources: metadata, the table of tensors, and one tensor at a time.

A file has a header (magic, version, counts), metadata by key, a table of tensors, and the tensors' bytes, aligned. The
format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count, length and offset is checked before anything of
that size is allocated.
"""

import math
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from sebp_edge.engine.models.gguf.quantised import OTHER_TYPES, TYPES, QuantType, dequantise
from sebp_edge.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
# Limits far above known models: Gemma 3 has 262,000 tokens, 515,000 merges and a table of 16 MB.
_MAX_TABLE = 2**27
_MAX_ENTRIES = 2**16
_MAX_ELEMENTS = 2**22
_MAX_DIMENSIONS = 4
_READ_AHEAD = 2**20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

T = TypeVar("T")


class TensorInfo(NamedTuple):
    """A tensor in a file.

    Attributes:
        kind: its type; None if it cannot be dequantised.
        shape: in torch's order.
        offset, size: the position of its bytes in the file; the size is 0 if the type is unknown.
    """

    kind: QuantType | None
    type_name: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """A GGUF file, open for reading until `close` or the end of a `with`.

    Attributes:
        name: what messages call it.
        metadata: values by key: numbers, strings, and lists of either.
        tensors: the tensors by name, in the file's order.
    """

    def __init__(self, path: Path, name: str | None = None):
        self.path, self.name = path, name or path.name
        self._file = self._open()
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            table = _Header(self._file, min(self.size, _MAX_TABLE))
            self.metadata, self.tensors = self._parse(table)
        except BaseException as error:
            self._file.close()
            if isinstance(error, _Unusable | OSError):
                reason = (error.strerror or "the disk refuses it") if isinstance(error, OSError) else error
                raise ModelError(f"{self.name!r} is not a usable GGUF file: {reason}; download it again.") from error
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family; "" if the file has none."""
        return self.get("general.architecture", str, "")

    def get(self, key: str, kind: type[T], default: Any = None) -> T | Any:
        """Returns a value of the metadata, or `default` if there is none."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.name!r} has {key} of type {type(value).__name__}; expected {kind.__name__}.")
        return value

    def positive(self, kind: type[T], key: str, default: T | None = None) -> T:
        """Returns a positive number of the family's metadata; `key` lacks the family's name."""
        key = f"{self.architecture}.{key}"
        value = self.get(key, kind, default)
        if value is None or not 0 < value < (2**31 if kind is int else math.inf):
            raise ModelError(f"{self.name!r} has {key} {value}; expected a positive number.")
        return value

    def by_layer(self, key: str, layers: int, kind: type[T] = int, default: T | None = None) -> list[T]:
        """Returns a value of the family's metadata for each layer, or in a list the one for all; not all may be 0."""
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        values = value if isinstance(value, list) else [value]
        is_sound = all(type(each) is kind and 0 <= each < 2**31 for each in values) and any(values)
        if not is_sound or len(values) not in (1, layers):
            raise ModelError(f"{self.name!r} has {key} {str(value)[:40]}; expected a number for all or each layer.")
        return values

    def token_id(self, role: str) -> int | None:
        """Returns the number of the tokenizer's token with a role, such as "bos"; None if there is none."""
        number, tokens = self.get(f"tokenizer.ggml.{role}_token_id", int), self.get("tokenizer.ggml.tokens", list, [])
        if number is not None and tokens and not 0 <= number < len(tokens):
            raise ModelError(f"{self.name!r} has the {role} token {number}, but only {len(tokens)} tokens.")
        return number

    def forget_tokenizer(self) -> None:
        """Frees the tokenizer's values, tens of bytes for each token and each merge."""
        self.metadata = {key: value for key, value in self.metadata.items() if not key.startswith("tokenizer.")}

    def refuse_unreadable_types(self) -> None:
        """Raises a ModelError if tensors cannot be dequantised."""
        unknown = sorted({tensor.type_name for tensor in self.tensors.values() if tensor.kind is None})
        if unknown:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise ModelError(f"{self.name!r} has tensors of type {', '.join(unknown)}; expected {known}.")

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor's weights, rounded from fp32 to `dtype`."""
        tensor = self.tensors[name]
        if tensor.kind is None:
            self.refuse_unreadable_types()
        return dequantise(self.read_bytes(name), tensor.kind, torch.empty(tensor.shape, dtype=dtype))

    def read_bytes(self, name: str) -> Tensor:
        """Returns a tensor's bytes as they are in the file, uint8."""
        tensor = self.tensors[name]
        raw = torch.empty(tensor.size, dtype=torch.uint8)
        self._file.seek(tensor.offset)
        # Not memory-mapped: a file that is truncated meanwhile would end the process.
        if self._file.readinto(raw.numpy()) != tensor.size:
            raise ModelError(f"{self.name!r} has changed while it was read; try again.")
        return raw

    def _open(self) -> BinaryIO:
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise ModelError(f"{self.name!r} cannot be read: {error.strerror}.") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ModelError(f"{self.name!r} is not a regular file; expected a GGUF file.")
        return os.fdopen(descriptor, "rb")

    def _parse(self, table: "_Header") -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.size < 24 or table.take(4) != _MAGIC:
            raise _Unusable("it does not begin with GGUF's header")
        version = table.number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            found = "it is big-endian" if swapped else f"it has version {version}"
            raise _Unusable(f"{found}, expected version 2 or 3, little-endian")
        num_tensors, num_keys = table.number("Q"), table.number("Q")
        for count, what in ((num_tensors, "tensors"), (num_keys, "metadata keys")):
            if count > _MAX_ENTRIES:
                raise _Unusable(f"its header has {count:.6g} {what}, expected at most {_MAX_ENTRIES}")
        metadata = {}
        for _ in range(num_keys):
            key = table.string()
            metadata[key] = table.value(table.number("I"))
        entries = [self._entry(table) for _ in range(num_tensors)]
        return metadata, self._located(entries, metadata.get("general.alignment", _ALIGNMENT), table.position)

    def _entry(self, table: "_Header") -> tuple[str, TensorInfo]:
        name = table.string()
        num_dimensions = table.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Unusable(f"a tensor has {num_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([table.number("Q") for _ in range(num_dimensions)]))
        number, offset = table.number("I"), table.number("Q")
        kind = TYPES.get(number)
        # Also keeps products of absurd dimensions from growing.
        if not all(1 <= length <= 8 * self.size for length in shape) or (kind and shape[-1] % kind.weights):
            raise _Unusable(f"a tensor has the shape {list(shape)}")
        size = math.prod(shape) // kind.weights * kind.size if kind else 0
        type_name = kind.name if kind else OTHER_TYPES.get(number, f"number {number}")
        return name, TensorInfo(kind, type_name, shape, offset, size)

    def _located(self, entries: list[tuple[str, TensorInfo]], alignment: Any, end: int) -> dict[str, TensorInfo]:
        """Makes offsets relative to the file; refuses tensors outside of it and on top of each other."""
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise _Unusable("its alignment is not a power of two")
        start = -(-end // alignment) * alignment
        tensors = {name: info._replace(offset=start + info.offset) for name, info in entries}
        if len(tensors) < len(entries):
            raise _Unusable("two tensors have the same name")
        end = start
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end or info.offset % alignment:
                raise _Unusable("its tensors overlap or are not aligned")
            end = info.offset + info.size
        if end > self.size:
            raise _Unusable(f"it ends at byte {self.size}, but its tensors need {end} bytes")
        return tensors


class _Unusable(Exception):
    """A reason why a file is not used."""


class _Header:
    """Reads values from the beginning of a file, which is read as far as needed."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size = file, size
        self._read, self.position, self._elements = bytearray(), 0, 0

    def take(self, length: int) -> bytes:
        start = self.position
        self._need(length)
        self.position += length
        return bytes(self._read[start : start + length])

    def number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        return next(self._strings(1))

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            self._elements += count
            if self._elements > _MAX_ELEMENTS:
                raise _Unusable(f"its metadata has over {_MAX_ELEMENTS} elements")
            if kind == _STRING:
                self._need(8 * count)
                return list(self._strings(count))
            if kind in _SCALARS:
                return list(self._numbers(_SCALARS[kind], count))
        elif kind == _STRING:
            return self.string()
        elif kind in _SCALARS:
            return self.number(_SCALARS[kind])
        raise _Unusable(f"its metadata has a value of the unknown type {kind}")

    def _need(self, length: int) -> None:
        """Reads until the next `length` bytes are there."""
        end = self.position + length
        if end > self._size:
            raise _Unusable("it ends within its metadata")
        if end > len(self._read):
            self._read += self._file.read(max(end - len(self._read), _READ_AHEAD))
            if end > len(self._read):
                raise _Unusable("it ends within its metadata")

    def _numbers(self, code: str, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        self._need(layout.size)
        values = layout.unpack_from(self._read, self.position)
        self.position += layout.size
        return values

    def _strings(self, count: int) -> Iterator[str]:
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            self._need(8)
            (length,) = length_of(self._read, self.position)
            self.position += 8
            try:
                yield self.take(length).decode()
            except UnicodeDecodeError:
                raise _Unusable("its metadata has a text that is not UTF-8") from None
