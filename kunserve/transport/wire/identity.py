"""Who a socket belongs to: the routing id that it connects with."""

import secrets
import struct
from typing import NamedTuple

from kunserve.core.ids import InstanceId

_FORM = struct.Struct(">cI8s")


class Identity(NamedTuple):
    """One socket of one process."""

    lane: bytes
    """One byte: what the socket is for."""
    instance_id: InstanceId
    incarnation: bytes
    """Eight random bytes per process, so that a dead process's late messages are known."""


def new_incarnation() -> bytes:
    """The mark of one process."""
    return secrets.token_bytes(8)


def pack(identity: Identity) -> bytes:
    """The identity as a socket's routing id."""
    return _FORM.pack(*identity)


def unpack(data: bytes) -> Identity | None:
    """The identity in a routing id, or None if it is not one of ours."""
    if len(data) != _FORM.size:
        return None
    lane, instance_id, incarnation = _FORM.unpack(data)
    return Identity(lane, InstanceId(instance_id), incarnation)
