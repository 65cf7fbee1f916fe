"""How a process is reached from other hosts, and whom it believes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import zmq

LINK_TIMEOUT_S = 1.0
"""A connection on which nothing comes for this long, heartbeats included, is broken."""


class Keys(NamedTuple):
    """One process's pair of CurveZMQ keys, as 40 characters of Z85 each."""

    public: str
    secret: str


@dataclass(frozen=True, slots=True)
class FrontPlace:
    """Where a front is called, and who answers there. An instance's process reads it on its
    standard input when its front is another one.
    """

    address: str
    public_key: str | None = None
    """None: as that of the one before, or no keys are used."""


def new_keys() -> Keys:
    """A pair that nobody else has."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Network:
    """One process's place in the network. Without one, all sockets are files of this machine.

    Keys are CurveZMQ's, as 40 characters of Z85. They are made for one process and reach it with
    its order, or are made beside it; public ones travel with the addresses they belong to.
    """

    host: str
    """Name or address by which others reach it. Whoever starts the process fills it in."""
    public_key: str
    secret_key: str
    front_public_key: str
    """Of the only process whose commands it carries out."""
    bind_host: str | None = None
    """What it binds, where that is not ``host``: behind address translation, 0.0.0.0."""
    link_timeout_s: float = LINK_TIMEOUT_S

    @property
    def keys(self) -> Keys:
        """Its own."""
        return Keys(self.public_key, self.secret_key)

    @property
    def any_port(self) -> str:
        """Where its sockets are bound."""
        return any_port_of(self.bind_host or self.host)

    @property
    def machine(self) -> str:
        """Equal for processes that can read each other's memory files."""
        return f"{boot_id()}/{self.host}"

    def advertised(self, endpoint: str) -> str:
        """How others reach a socket that is bound at ``endpoint``."""
        return f"tcp://{bracketed(self.host)}:{endpoint.rpartition(':')[2]}"


def any_port_of(host: str) -> str:
    """A free port of a host."""
    return f"tcp://{bracketed(host)}:*"


def bracketed(host: str) -> str:
    """A host as addresses have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


@cache
def boot_id() -> str:
    """Tells kernels apart, because two hosts may have equal numbers of processes and files."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
