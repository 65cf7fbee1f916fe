"""Who a socket belongs to, and the proof that it may speak.

Every connecting socket bears an identity with the cluster's secret token, so a stray local
process that finds a port cannot put messages in. The secret is in the identity rather than
in each message: it is checked by one comparison and costs no bytes per message.
"""

import hmac
import secrets
import struct
from typing import NamedTuple

from kunserve.core.ids import InstanceId

_HEAD = struct.Struct(">cI8s")


class Identity(NamedTuple):
    """One socket of one process."""

    lane: bytes
    """One byte: what the socket is for."""
    instance_id: InstanceId
    incarnation: bytes
    """Eight random bytes per process, so that a dead process's late messages are known."""


def new_token() -> str:
    """A secret for one cluster."""
    return secrets.token_hex(16)


def new_incarnation() -> bytes:
    """The mark of one process."""
    return secrets.token_bytes(8)


def pack(identity: Identity, token: str) -> bytes:
    """The identity as a socket's routing id."""
    return _HEAD.pack(*identity) + token.encode()


def unpack(data: bytes, token: str) -> Identity | None:
    """The identity of a peer that knows the token, else None."""
    head, proof = data[: _HEAD.size], data[_HEAD.size :]
    if len(head) != _HEAD.size or not hmac.compare_digest(proof, token.encode()):
        return None
    lane, instance_id, incarnation = _HEAD.unpack(head)
    return Identity(lane, InstanceId(instance_id), incarnation)
