"""Addresses for the sockets of a test, each used once."""

import atexit
import itertools

from kunserve.transport.wire.socket_folder import SocketFolder

FOLDER = SocketFolder()
atexit.register(FOLDER.remove)
_numbers = itertools.count()


def fresh_address() -> str:
    """Where nobody is yet."""
    return FOLDER.address(str(next(_numbers)))
