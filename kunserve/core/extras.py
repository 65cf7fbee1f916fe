"""Extras of a server: other packages bring them, and entry points name them.

A *seam* is a place where a server takes what it does not know: routes, a launcher, a tracer. The
entry point group ``kunserve.SEAM`` has the names of what is installed. Nothing is imported before
it is asked for, so a plain server loads no extra that it does not use.
"""

from importlib.metadata import entry_points
from typing import Any

from kunserve.core.errors import ConfigError


def find_extra(seam: str, name: str, asked_by: str) -> Any:
    """What the entry point ``name`` of a seam names; ``asked_by`` is what a user asked it with.

    Raises ConfigError if no installed package brings it, or if it lacks packages of its own.
    """
    found = entry_points(group=f"kunserve.{seam}", name=name)
    if not found:
        raise ConfigError(
            f"{asked_by} needs the package kunserve_extras, and no installed package brings "
            f"{name!r}: install KunServe from its folder"
        )
    try:
        return next(iter(found)).load()
    except ImportError as error:
        raise ConfigError(f"{asked_by} needs: pip install 'kunserve[{name}]' ({error})") from None


def extra_names(seam: str) -> list[str]:
    """Of what is installed for a seam, in order."""
    return sorted({entry.name for entry in entry_points(group=f"kunserve.{seam}")})


def every_extra(seam: str) -> list[Any]:
    """What all entry points of a seam name, in the order of their names."""
    return [entry.load() for entry in sorted(entry_points(group=f"kunserve.{seam}"))]
