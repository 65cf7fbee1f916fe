"""From the fields of the configuration to the flags of ``kunserve serve``."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import click

from kunserve.core.config import GROUPS, Flag, KunServeConfig
from kunserve.server.start.flags.option import (
    ByteSize,
    FiniteRange,
    HintedChoice,
    JsonObject,
    JsonSettings,
    ServeFlag,
    TextList,
)
from kunserve.server.start.foreign_flags import VALUES


def declared_flags(choices: Mapping[str, Sequence[str]]) -> list[ServeFlag]:
    """In the order in which ``--help`` lists them.

    ``choices`` are those of fields whose values ``core`` does not know.
    """
    found = [one for part in fields(KunServeConfig) for one in _flags(part.type, choices)]
    found.sort(key=lambda one: GROUPS.index(one[0].group))
    flags = [flag for _, flag in found]
    for said, flag in found:
        if said.before is not None:
            flags.remove(flag)
            flags.insert([one.name for one in flags].index(said.before), flag)
    return flags


def setting(part: Any, name: str, **changes: Any) -> dict[str, Any]:
    """What click is told where another command has a setting too: its type, default and help.

    ``changes`` are what is not the same there.
    """
    (field,) = (one for one in fields(part) if one.name == name)
    kind, said = get_args(field.type)
    attributes = _attributes(name, kind, field.default, said, said.choices)
    same: dict[str, Any] = {x: attributes[x] for x in ("type", "default") if x in attributes}
    return {**same, "help": _helps(part)[name], **changes}


def _flags(part: Any, choices: Mapping[str, Sequence[str]]) -> Iterator[tuple[Flag, ServeFlag]]:
    helps = _helps(part)
    for field in fields(part):
        kind, said = (*get_args(field.type), None, None)[:2]
        if isinstance(said, Flag):
            one_of = choices.get(field.name, said.choices)
            attributes = _attributes(field.name, kind, field.default, said, one_of)
            names = said.name.split() if said.name else ["--" + field.name.replace("_", "-")]
            has_pair = "/" not in names[0] and (said.can_negate or field.default is True)
            if has_pair:
                names = [f"{names[0]}/--no-{names[0][2:]}"]
            flag = ServeFlag(
                [*names, field.name], group=said.group, help=helps[field.name], **attributes
            )
            yield said, flag


def _attributes(
    name: str, kind: Any, default: Any, said: Flag, choices: Sequence[str]
) -> dict[str, Any]:
    """What click is told of a field: its type, and its default unless that is nothing."""
    if type(None) in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    attributes: dict[str, Any] = {"many": said.is_many, "secret": said.is_secret}
    if kind is bool:
        attributes["is_flag"] = True
    elif not said.is_many:
        attributes["type"] = _type(name, kind, said, choices)
    if default in ("", ()) and not said.is_many:
        attributes |= {"default": default, "show_default": False}
    elif not (default is None or default is False or default == ()):
        shown = None if said.suits_device else default
        attributes |= {"default": shown, "show_default": True}
    return attributes


def _type(name: str, kind: Any, said: Flag, choices: Sequence[str]) -> Any:
    if get_origin(kind) is Literal and not choices:
        choices = get_args(kind)
    if choices:
        hints = VALUES.get(name)
        if hints is not None:
            return HintedChoice([*choices], hints)
        return click.Choice([*choices], case_sensitive=not said.ignores_case)
    low, is_open = (said.least, False) if said.above is None else (said.above, True)
    if kind is float:
        return FiniteRange(low, said.most, min_open=is_open)
    if kind is int:
        if name.endswith("_bytes"):
            return ByteSize()
        least, most = (None if one is None else int(one) for one in (low, said.most))
        return click.INT if least is None else click.IntRange(least, most)
    if isinstance(kind, type) and is_dataclass(kind):
        return JsonSettings(kind)
    if said.is_json:
        return JsonObject()
    return click.STRING if kind is str else TextList()


def _helps(part: type) -> dict[str, str]:
    """The first paragraph behind each field. Python keeps none of them, so the source is read."""
    (body,) = (one.body for one in _classes(part.__module__) if one.name == part.__name__)
    return {
        field.target.id: " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
        for field, behind in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
        if isinstance(text := behind.value.value, str)
    }


@functools.cache
def _classes(module: str) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return [one for one in tree.body if isinstance(one, ast.ClassDef)]
