"""Messages as bytes: one byte for the type, then MessagePack of its fields; tokens as int32.

The registry is the closed union of ``core.messages``; its order is the wire format, so both
ends must run the same version (they are processes of one cluster).
"""

from typing import Any, get_args

import msgspec

from kunserve.core.messages import Message
from kunserve.core.tokens import TokenIds

MESSAGE_TYPES: tuple[type[Message], ...] = get_args(Message)
"""Every type that crosses a process boundary; the position is the type's tag."""


def encode_tokens(value: Any) -> bytes:
    """msgspec's hook for what it does not know: token ids."""
    if isinstance(value, TokenIds):
        return value.to_bytes()
    raise NotImplementedError(type(value).__name__)


def decode_tokens(kind: type, value: Any) -> TokenIds:
    """The hook back: from bytes, or from the list that a plain tuple became."""
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds.from_bytes(value)
    if kind is TokenIds and isinstance(value, list):
        return TokenIds(value)
    raise ValueError(f"{type(value).__name__} is no {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_tokens)
_DECODERS = tuple(msgspec.msgpack.Decoder(kind, dec_hook=decode_tokens) for kind in MESSAGE_TYPES)
_TAG_OF: dict[type, int] = {kind: tag for tag, kind in enumerate(MESSAGE_TYPES)}
_INITIAL_BYTES = 4096


class MalformedMessage(Exception):
    """Bytes that are no message, or a message that cannot become bytes."""


class LostMessages(MalformedMessage):
    """The messages before this one have not come."""


def encode(message: Message) -> bytearray:
    """The message as bytes. Raises MalformedMessage where a value has no wire form.

    Integers must fit 64 bits and strings must be valid Unicode.
    """
    tag = _TAG_OF.get(type(message))
    if tag is None:
        raise MalformedMessage(f"{type(message).__name__} is not in the union of messages")
    buffer = bytearray(_INITIAL_BYTES)
    buffer[0] = tag
    try:
        _ENCODER.encode_into(message, buffer, 1)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"{type(message).__name__}: {error}") from error
    return buffer


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in ``data``, every field's type checked. Raises MalformedMessage."""
    view = memoryview(data)
    if not view:
        raise MalformedMessage("no bytes")
    tag = view[0]
    if tag >= len(_DECODERS):
        raise MalformedMessage(f"unknown type tag {tag}")
    try:
        return _DECODERS[tag].decode(view[1:])
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"{MESSAGE_TYPES[tag].__name__}: {error}") from error
