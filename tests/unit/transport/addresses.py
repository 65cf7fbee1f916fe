"""Addresses for the sockets of a test, each used once."""

import atexit
import itertools
import os

from kunserve.transport.wire.socket_folder import SocketFolder

FOLDER = SocketFolder()
atexit.register(FOLDER.remove)
_numbers = itertools.count()


def fresh_address() -> str:
    """Where nobody is yet, in none of the forks of this process either."""
    return FOLDER.address(f"{os.getpid()}-{next(_numbers)}")
