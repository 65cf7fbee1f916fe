"""``--config FILE``: flags as keys of a YAML file, checked key by key.

A key is a flag without its dashes, with ``-`` or ``_`` between words, and ``model`` is the model.
The command line goes before the environment, and the environment before the file.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from kunserve.server.start.flags.option import (
    JsonObject,
    JsonSettings,
    ModelArgument,
    ServeFlag,
    TextList,
    expected,
)
from kunserve.server.start.foreign_flags import FLAGS


def read_config_file(path: Path, command: click.Command, ctx: click.Context) -> dict[str, Any]:
    """The file's values by the names of ``command``'s parameters.

    Raises UsageError, which names the file and the key, for whatever the command cannot take.
    """
    return checked_settings(str(path), _mapping(path), command, ctx)


def checked_settings(
    where: str, settings: Mapping[Any, Any], command: click.Command, ctx: click.Context
) -> dict[str, Any]:
    """Values by flag, as values by the names of ``command``'s parameters.

    Raises UsageError, which says where they stand, for whatever the command cannot take.
    """
    keys = dict(_keys(command))
    values: dict[str, Any] = {}
    for written, value in settings.items():
        key = str(written).replace("_", "-")
        if key not in keys:
            raise click.UsageError(f"{where}: {_unknown(str(written), key, keys)}")
        parameter, is_off = keys[key]
        name = parameter.name
        assert name is not None
        if name in values:
            raise click.UsageError(f"{where}: `{written}` is given twice.")
        try:
            values[name] = _checked(parameter, value, is_off, ctx)
        except (click.BadParameter, ValueError) as error:
            said = error.message if isinstance(error, click.BadParameter) else str(error)
            raise click.UsageError(
                f"{where}: `{written}` must be {expected(parameter)}: {said}"
            ) from None
    return values


def _keys(command: click.Command) -> Iterator[tuple[str, tuple[click.Parameter, bool]]]:
    """Each key with its parameter, and whether it says the opposite (``no-lookahead``)."""
    for parameter in command.params:
        if isinstance(parameter, ModelArgument):
            yield parameter.key, (parameter, False)
        elif isinstance(parameter, ServeFlag):
            for name in parameter.opts:
                yield name.lstrip("-"), (parameter, False)
            for name in parameter.secondary_opts:
                yield name.lstrip("-"), (parameter, True)


def _mapping(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is no text in UTF-8.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        what = getattr(error, "problem", None) or "malformed"
        raise click.UsageError(f"{path}{where}: no valid YAML: {what}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise click.UsageError(f"{path} must hold lines of the form `key: value`.")
    return content


def _unknown(written: str, key: str, keys: Mapping[str, object]) -> str:
    reason = FLAGS.get(f"--{key}")
    if reason is not None:
        return f"`{written}` is not supported: {reason}."
    close = difflib.get_close_matches(key, keys, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return f"`{written}` is no setting.{hint}"


def _checked(parameter: click.Parameter, value: Any, is_off: bool, ctx: click.Context) -> Any:
    """The value as click takes it, after a trial. YAML's own types are not bent into others."""
    if value is None:
        raise ValueError("it has no value here")
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither")
        return value is not is_off
    if isinstance(parameter.type, TextList):
        parameter.type.convert(value, parameter, ctx)
        return value
    if isinstance(parameter.type, JsonObject | JsonSettings):
        parameter.type.convert(value, parameter, ctx)
        return JsonObject().convert(value, parameter, ctx)
    many = getattr(parameter, "multiple", False)
    items = value if many and isinstance(value, list) else [value]
    for item in items:
        is_text = parameter.type is click.STRING or isinstance(parameter.type, click.Choice)
        if is_text and not isinstance(item, str):
            raise ValueError(f"{item!r} is no text, put it between quotes")
        if isinstance(item, bool | list | dict):
            raise ValueError(f"{item!r} is something else")
        if isinstance(item, float) and isinstance(parameter.type, click.IntRange):
            raise ValueError(f"{item!r} is no integer")
        parameter.type.convert(item, parameter, ctx)
    return items if many else value
