"""Every message of the closed union survives the wire exactly; nothing else gets through."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.tokens import TokenIds
from kunserve.transport.wire.codec import MESSAGE_TYPES, MalformedMessage, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: TEXT,
    type(None): st.none(),
    TokenIds: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(TokenIds),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type: leaves, new types, unions, tuples, records."""
    if kind in LEAVES:
        return LEAVES[kind]
    if isinstance(kind, typing.NewType):
        return values_of(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(arg) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values_of(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})
    return st.from_type(kind)


def shapes(value: Any) -> Iterable[type]:
    """The types of a value and of everything in it."""
    yield type(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from shapes(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from shapes(item)


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @settings(max_examples=40)
    @given(values_of(kind))
    def check(message: Any) -> None:
        again = decode(encode(message))
        assert again == message
        assert list(shapes(again)) == list(shapes(message))

    check()


@given(st.binary(max_size=64))
def test_any_bytes_give_a_message_or_the_typed_error(data: bytes) -> None:
    try:
        message = decode(data)
    except MalformedMessage:
        return
    assert type(message) in MESSAGE_TYPES


@settings(max_examples=60)
@given(st.one_of([values_of(kind) for kind in MESSAGE_TYPES]), st.data())
def test_truncated_messages_are_refused(message: Any, data: st.DataObject) -> None:
    whole = bytes(encode(message))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MalformedMessage):
        decode(whole[:cut])
