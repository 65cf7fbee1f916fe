from kunserve.core.ids import InstanceId
from kunserve.transport.identity import Identity, new_incarnation, new_token, pack, unpack


def test_round_trip() -> None:
    token = new_token()
    who = Identity(b"m", InstanceId(70_000), new_incarnation())
    packed = pack(who, token)
    assert unpack(packed, token) == who
    assert packed[0] != 0 and len(packed) <= 255, "ZeroMQ keeps the others for itself"


def test_strangers_are_nobody() -> None:
    token = new_token()
    packed = pack(Identity(b"m", InstanceId(1), new_incarnation()), token)
    assert unpack(packed, new_token()) is None
    assert unpack(packed[:-1], token) is None
    assert unpack(packed + b"x", token) is None
    assert unpack(b"", token) is None
    assert unpack(b"\x00\x01\x02\x03\x04", token) is None
