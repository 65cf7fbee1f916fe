"""Where an instance stands, as far as the way between two of them goes."""

from typing import NamedTuple


class Place(NamedTuple):
    """A host in a rack. Instances of one host share its memory; those of one rack, a switch."""

    host: str = ""
    """Empty: the only one."""
    rack: str = ""
    """Empty: the only one."""
    link_gbps: float | None = None
    """What one direction of the host's network link carries; None: nobody said."""


ONE_HOST = Place()
"""Everywhere, when nobody says where anything stands."""
