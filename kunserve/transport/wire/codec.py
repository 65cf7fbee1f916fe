"""Values of a closed set of types as bytes: one byte for the type, then MessagePack of its fields.

Tokens go as int32. The order of the types is the wire format, so both ends must run the same
version. Messages are those of ``core.messages``; whoever has a set of its own makes a ``Codec``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import msgspec

from kunserve.core.messages import Message
from kunserve.core.tokens import TokenIds

MESSAGE_TYPES: tuple[type[Message], ...] = get_args(Message)
"""Every type that crosses a process boundary; the position is the type's tag."""
T = TypeVar("T")


def encode_tokens(value: Any) -> bytes | str:
    """msgspec's hook for what it does not know: token ids, and paths."""
    if isinstance(value, TokenIds):
        return value.to_bytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def decode_tokens(kind: type, value: Any) -> TokenIds | Path:
    """The hook back: from bytes, or from the list that a plain tuple became."""
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds.from_bytes(value)
    if kind is TokenIds and isinstance(value, list):
        return TokenIds(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"{type(value).__name__} is no {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_tokens)
_INITIAL_BYTES = 4096


class MalformedMessage(Exception):
    """Bytes that are no message, or a message that cannot become bytes."""


class LostMessages(MalformedMessage):
    """The messages before this one have not come."""


class Codec(Generic[T]):
    """For these types, in this order."""

    def __init__(self, kinds: Iterable[type[T]]) -> None:
        self._kinds = tuple(kinds)
        self._tags: dict[type, int] = {kind: tag for tag, kind in enumerate(self._kinds)}
        self._decoders = [
            msgspec.msgpack.Decoder(kind, dec_hook=decode_tokens) for kind in self._kinds
        ]

    def encode(self, message: T) -> bytearray:
        """The message as bytes. Raises MalformedMessage where a value has no wire form.

        Integers must fit 64 bits and strings must be valid Unicode.
        """
        tag = self._tags.get(type(message))
        if tag is None:
            raise MalformedMessage(f"{type(message).__name__} is not in the union of messages")
        buffer = bytearray(_INITIAL_BYTES)
        buffer[0] = tag
        try:
            _ENCODER.encode_into(message, buffer, 1)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"{type(message).__name__}: {error}") from error
        return buffer

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """The message in ``data``, every field's type checked. Raises MalformedMessage."""
        view = memoryview(data)
        if not view:
            raise MalformedMessage("no bytes")
        tag = view[0]
        if tag >= len(self._decoders):
            raise MalformedMessage(f"unknown type tag {tag}")
        try:
            return self._decoders[tag].decode(view[1:])
        except (
            msgspec.MsgspecError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise MalformedMessage(f"{self._kinds[tag].__name__}: {error}") from error


MESSAGES: Codec[Message] = Codec(MESSAGE_TYPES)
encode, decode = MESSAGES.encode, MESSAGES.decode
