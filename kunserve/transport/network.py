"""How a process is reached from other hosts, and whom it believes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """One process's place in the network. Without one, all sockets are files of this machine.

    Keys are CurveZMQ's, as 40 characters of Z85. They are made for one process and reach it with
    its order; public ones travel with the addresses they belong to.
    """

    host: str
    """Name or address that it binds, and by which others reach it."""
    public_key: str
    secret_key: str
    front_public_key: str
    """Of the only process whose commands it carries out."""
