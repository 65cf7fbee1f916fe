"""Token ids in four bytes each, in memory and on the wire.

A tuple of Python integers takes forty. A long queue of long prompts would fill gigabytes, and a
message with one prompt would take milliseconds to read.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

TYPE_CODE = "i"
TOKEN_BYTES = 4
assert array(TYPE_CODE).itemsize == TOKEN_BYTES


class TokenIds(Sequence[int]):
    """Token ids that never change. Equal to the tuple of the same integers."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array(TYPE_CODE)
        self._ids.extend(ids._ids if isinstance(ids, TokenIds) else ids)

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenIds":
        """What ``to_bytes`` gave. Raises ValueError for a length that is no multiple of four."""
        ids = array(TYPE_CODE)
        ids.frombytes(data)
        return cls(ids)

    def to_bytes(self) -> bytes:
        """Four bytes each, in the machine's order: both ends of a wire are of one kind."""
        return self._ids.tobytes()

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...
    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        if isinstance(index, slice):
            return TokenIds(self._ids[index])
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._ids == other._ids
        if isinstance(other, tuple):
            return tuple(self._ids) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ids))

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"


NO_TOKENS = TokenIds()
