"""Reads a GGUF file's header: metadata and where each tensor's bytes are.

The ``gguf`` package's reader takes seconds over a vocabulary of 50,000 strings and reports a
truncated file as an IndexError; both matter at every start of every instance.
"""

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kunserve.core.errors import ModelFiles

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_DEEPEST_ARRAY = 8
_NAMES = {int: "an integer", float: "a number", str: "a string", list: "a list", bool: "a flag"}
_SUPPORTED_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as PyTorch has it (the file stores the reverse)."""
    quant_type: int
    """GGML's number of the element type."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    num_bytes: int

    def get(self, key: str, expected: type, default: Any = None) -> Any:
        """A metadata value of the expected type; ModelFiles if it is missing with no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFiles(f"{self.path}: metadata has no {key!r}")
        if expected is float and type(value) is int:
            return float(value)
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise ModelFiles(f"{self.path}: {key!r} is {_shown(value)}, not {_NAMES[expected]}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A metadata integer above 0."""
        value: int = self.get(key, int, default)
        if value <= 0:
            raise ModelFiles(f"{self.path}: {key!r} is {value}, not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A metadata number above 0, and not infinite."""
        value: float = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise ModelFiles(f"{self.path}: {key!r} is {value}, not a positive number")
        return value


def _shown(value: object) -> str:
    """A value in a message, however long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _Cursor:
    """Reads values one after the other from a buffer."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self.buffer, self.at)
        first = self.at + 8
        self.at = first + size
        if self.at > len(self.buffer):
            raise struct.error("a string runs past the end of the file")
        return self.buffer[first : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == _DEEPEST_ARRAY:
                raise struct.error("arrays are nested too deep")
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                layout = f"<{count}{_SCALARS[element]}"
                values = struct.unpack_from(layout, self.buffer, self.at)
                self.at += struct.calcsize(layout)
                return list(values)
            return [self.value(element, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"metadata of unknown type {kind}")
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """The header of the file at ``path``; ModelFiles says what is wrong with it."""
    try:
        stat = path.stat()
        return _read_version(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ModelFiles(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise ModelFiles(f"{path}: truncated or corrupt GGUF header: {error}") from error


@functools.lru_cache(maxsize=2)
def _read_version(path: Path, num_bytes: int, mtime_ns: int) -> GgufFile:
    """One state of a file. Shape, end tokens, tokenizer and weights all ask for it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(path, _Cursor(data))


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.buffer[:4] != b"GGUF":
        raise ModelFiles(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in _SUPPORTED_VERSIONS:
        raise ModelFiles(f"{path}: GGUF version {version} is not one of {_SUPPORTED_VERSIONS}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    found = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        found.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0:
        raise ModelFiles(f"{path}: 'general.alignment' is {_shown(alignment)}, no size")
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(name, shape, quant_type, data_offset + offset)
        for name, shape, quant_type, offset in found
    }
    return GgufFile(path, metadata, tensors, len(cursor.buffer))
