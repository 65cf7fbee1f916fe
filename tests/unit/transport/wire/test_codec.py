import typing

import pytest

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Alive, Command, Event, PeerMessage, Submit
from kunserve.core.request import Request, SamplingParams
from kunserve.transport.wire.codec import MESSAGE_TYPES, MalformedMessage, decode, encode


def submit(**sampling: int) -> Submit:
    return Submit(Request(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=4, **sampling), 0.5))


def test_every_conversation_is_covered() -> None:
    spoken = {kind for union in (Command, Event, PeerMessage) for kind in typing.get_args(union)}
    assert set(MESSAGE_TYPES) == spoken
    assert len(MESSAGE_TYPES) < 256


def test_defaults_and_integers_for_floats_survive() -> None:
    message = submit()
    assert decode(encode(message)) == message
    warm = Submit(Request(RequestId("r"), (), SamplingParams(1, temperature=2), 3))
    assert decode(encode(warm)) == warm


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x00", bytes([200]) + b"\xc0"])
def test_nonsense_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_wrong_field_types_are_refused() -> None:
    good = encode(Abort(RequestId("r")))
    assert decode(good) == Abort(RequestId("r"))
    bad = encode(Alive(InstanceId(3)))
    bad[0] = good[0]
    with pytest.raises(MalformedMessage, match="Abort"):
        decode(bad)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(submit()) + b"\x00")


@pytest.mark.parametrize(
    "message",
    [submit(seed=2**70), Abort(RequestId("\ud800")), "a string"],
    ids=["too large", "no Unicode", "no message"],
)
def test_what_has_no_wire_form_is_a_typed_error(message: object) -> None:
    with pytest.raises(MalformedMessage):
        encode(message)  # type: ignore[arg-type]
