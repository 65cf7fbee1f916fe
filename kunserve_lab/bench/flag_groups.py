"""Flags of the laboratory's commands, in groups."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from kunserve.server.start.flags.grouped import GroupedOption

_F = TypeVar("_F", bound=Callable[..., object])


def option(group: str, defaults: object = None) -> Callable[..., Callable[[_F], _F]]:
    """``click.option`` for one group of flags.

    An option whose value is a field of ``defaults`` takes its default from there and shows it.
    """

    def declare(*names: str, **attrs: Any) -> Callable[[_F], _F]:
        value = getattr(defaults, _parameter(names), None)
        if not (value is None or value is False or value == ()):
            attrs = {"default": value, "show_default": True} | attrs
        return click.option(*names, cls=GroupedOption, group=group, **attrs)

    return declare


def _parameter(names: Sequence[str]) -> str:
    """The name that click gives the value: the one without dashes, else the flag's own."""
    plain = [name for name in names if not name.startswith("-")]
    first = plain[0] if plain else names[-1].partition("/")[0]
    return first.lstrip("-").replace("-", "_")
