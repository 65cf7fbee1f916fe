from kunserve.core.ids import InstanceId
from kunserve.transport.wire.identity import Identity, new_incarnation, pack, unpack


def test_round_trip() -> None:
    who = Identity(b"m", InstanceId(70_000), new_incarnation())
    packed = pack(who)
    assert unpack(packed) == who
    assert packed[0] != 0 and len(packed) <= 255, "ZeroMQ keeps the others for itself"


def test_strangers_are_nobody() -> None:
    packed = pack(Identity(b"m", InstanceId(1), new_incarnation()))
    for other in (packed[:-1], packed + b"x", b"", b"\x00\x01\x02\x03\x04"):
        assert unpack(other) is None
