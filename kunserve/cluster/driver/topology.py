"""``--topology``: a TOML or JSON file that says where instances stand.

link_gbps = 100                 # of every host that says nothing else

[[hosts]]
name = "a"
rack = "left"
instances = 4                   # how many: those with the lowest numbers that are free

[[hosts]]
name = "b"
rack = "left"
link_gbps = 25
instances = [1, 5]              # or which
"""

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kunserve.core.config import ClusterConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.place import ONE_HOST, Place

Places = tuple[Place, ...]
"""By instance."""


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    instances: int | list[int]
    rack: str = ""
    link_gbps: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    hosts: list[_Host]
    link_gbps: float | None = None


def read_topology(path: Path, num_instances: int) -> Places:
    """Where instances 0, 1, 2 and so on stand. There are places for so many at least.

    Raises ConfigError that says what is wrong with the file.
    """
    try:
        return _places(_parsed(path), num_instances)
    except ConfigError as error:
        raise ConfigError(f"--topology {path}: {error}") from None


def places_of(config: ClusterConfig) -> Places:
    """As the cluster's settings have it; empty where no file says anything."""
    if config.topology is None:
        return ()
    most = max(config.num_instances, config.max_instances or 0)
    return read_topology(Path(config.topology), most)


def place_of(places: Places, instance_id: InstanceId) -> Place:
    """Of one instance. All stand on one host where there is no file.

    One beyond the file (`kunserve scale`) stands on a host of its own, as far as anybody knows.
    """
    if instance_id < len(places):
        return places[instance_id]
    return Place(host=f"instance {instance_id}") if places else ONE_HOST


def _parsed(path: Path) -> _File:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is no text: {error}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(values, _File)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{error}; it wants [[hosts]] with name, instances (a number, or a list of instances), "
            "and where they matter rack and link_gbps"
        ) from None


def _places(file: _File, num_instances: int) -> Places:
    _check_hosts(file)
    named = dict(_named(file))
    counted = sum(host.instances for host in file.hosts if isinstance(host.instances, int))
    num_places = len(named) + counted
    if num_places < num_instances:
        raise ConfigError(
            f"it has places for {num_places} instances, and there are {num_instances}"
        )
    beyond = [number for number in named if number >= num_places]
    if beyond:
        raise ConfigError(
            f"it names instance {beyond[0]}, and has places for instances 0 to {num_places - 1}"
        )
    free = iter(number for number in range(num_places) if number not in named)
    for host in file.hosts:
        if isinstance(host.instances, int):
            named |= {next(free): _place(host, file) for _ in range(host.instances)}
    return tuple(named[number] for number in range(num_places))


def _named(file: _File) -> Iterator[tuple[int, Place]]:
    seen: dict[int, str] = {}
    for host in file.hosts:
        for number in host.instances if isinstance(host.instances, list) else ():
            if number < 0:
                raise ConfigError(f"host {host.name!r} names instance {number}; they begin at 0")
            if number in seen:
                raise ConfigError(
                    f"instance {number} stands on host {seen[number]!r} and on {host.name!r}"
                )
            seen[number] = host.name
            yield number, _place(host, file)


def _place(host: _Host, file: _File) -> Place:
    return Place(host.name, host.rack, host.link_gbps or file.link_gbps)


def _check_hosts(file: _File) -> None:
    if not file.hosts:
        raise ConfigError("it names no host")
    names = [host.name for host in file.hosts]
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(f"host {name!r} must have a name, and be named once")
    for host in file.hosts:
        if isinstance(host.instances, int) and host.instances < 0:
            raise ConfigError(f"host {host.name!r} has {host.instances} instances")
    for gbps in (file.link_gbps, *(host.link_gbps for host in file.hosts)):
        if gbps is not None and not 0.0 < gbps < math.inf:
            raise ConfigError(f"link_gbps must be above 0 and finite, not {gbps}")
