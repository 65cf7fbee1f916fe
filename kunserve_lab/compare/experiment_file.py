"""Experiments from TOML files, one laid over another."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from kunserve.core.config import OverloadConfig
from kunserve.core.errors import ConfigError
from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.others import OtherServers
from kunserve_lab.compare.settings import RealSetup, SimulatedSetup
from kunserve_lab.compare.systems import SYSTEMS, System, find_system

_PATHS = {"workload": ("trace", "lengths"), "setup": ("profile", "topology")}
"""Settings that name a file."""
_RENAMED = {"compare": "systems", "sweep": "loads", "load": "workload"}
"""Keys of older files, and what they are called now."""
Values = dict[str, Any]
_T = TypeVar("_T")


def read_experiment(path: Path) -> Experiment:
    """The experiment of a TOML file. `kunserve_lab.compare` describes the format.

    A path in a file is relative to that file. Raises ConfigError for what is unknown or wrong.
    """
    values = _merged(path, ())
    values.pop("base", None)
    try:
        world = World(str(values.pop("world", World.SIMULATED)))
    except ValueError:
        raise ConfigError(f"{path}: world must be 'real' or 'simulated'") from None
    given = values.pop("setup", {})
    setup: RealSetup | SimulatedSetup
    if world is World.REAL:
        setup = _converted(path, given, RealSetup, "setup")
    else:
        setup = _converted(path, given, SimulatedSetup, "setup")
    others = values.get("others")
    for name, other in others.items() if isinstance(others, dict) else ():
        _converted(path, other, OtherServers, f"others.{name}")
    tables = values.pop("variants", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: variants must be tables: [variants.NAME]")
    variants = {name: _variant(path, name, table) for name, table in tables.items()}
    kinds = get_type_hints(Experiment)
    fields = {name: _converted(path, value, kinds[name], name) for name, value in values.items()}
    return Experiment(setup=setup, variants=variants, **fields)


def _variant(path: Path, name: str, table: object) -> System:
    """A system of ours with other settings: those of ``[variants.NAME]``, whose ``of`` names it."""
    where = f"variants.{name}"
    if name in SYSTEMS:
        raise ConfigError(f"{path}, {where}: a system of ours has that name")
    if not isinstance(table, dict) or not isinstance(table.get("of"), str):
        raise ConfigError(f"{path}, {where}: it needs the name of a system, `of`")
    _check_keys(path, table, System, "of")
    overload = table.get("overload", {})
    _check_keys(path, overload, OverloadConfig)
    values = dataclasses.asdict(find_system(table["of"])) | table | {"name": name}
    del values["of"]
    if isinstance(overload, dict):
        values["overload"] = dataclasses.asdict(find_system(table["of"]).overload) | overload
    return _converted(path, values, System, where)


def _merged(path: Path, users: tuple[Path, ...]) -> Values:
    """The file's values laid over those of its base; ``users`` are the files that led here."""
    if path.resolve() in users:
        raise ConfigError(f"{path}: it is its own base")
    values = _read(path)
    base = values.get("base")
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base must be the name of a file, not {base!r}")
    under = _merged(path.parent / base, (*users, path.resolve()))
    if values.get("world", under.get("world")) != under.get("world"):
        under.pop("setup", None)  # the other world has other settings
    for name in _PATHS:
        over = values.get(name)
        below = under.get(name)
        if isinstance(over, dict) and isinstance(below, dict):
            values[name] = below | over
    return under | values


def _read(path: Path) -> Values:
    """One file's values, with its paths made relative to where we are."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_keys(path, values, Experiment, "world", "base")
    for table, names in _PATHS.items():
        settings = values.get(table)
        if not isinstance(settings, dict):
            continue
        for name in names:
            other = settings.get(name)
            if isinstance(other, str) and _is_path(other):
                settings[name] = str(path.parent / other)
    return values


def _is_path(name: str) -> bool:
    """Whether a file is meant. A word without a dot or a slash is the name of a data set."""
    return "." in name or "/" in name


def _check_keys(path: Path, values: object, kind: type, *more: str) -> None:
    known = [field.name for field in dataclasses.fields(kind)] + list(more)
    for key in values if isinstance(values, dict) else ():
        if key not in known:
            hint = f"it is called {_RENAMED[key]!r} now" if key in _RENAMED else ""
            hint = hint or f"there are: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown setting {key!r}; {hint}")


def _converted(path: Path, value: object, kind: type[_T], name: str) -> _T:
    """One of the file's keys as what it stands for."""
    if dataclasses.is_dataclass(kind):
        _check_keys(path, value, kind)
    try:
        return msgspec.convert(value, kind, dec_hook=lambda to, text: to(text), strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}, {name}: {error}") from None
