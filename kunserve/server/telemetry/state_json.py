"""Snapshots as JSON objects with named fields."""

import dataclasses
from typing import Any

from kunserve.core.load import LoadReport
from kunserve.core.snapshots import ClusterState, TransitionRecord


def to_plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts, tuples as lists, the rest as it is."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None:
            return {name: to_plain(one) for name, one in zip(names, value, strict=True)}
        return [to_plain(one) for one in value]
    return value


def record_object(record: TransitionRecord) -> dict[str, Any]:
    """A transition; its outcome with the reason, as people read it."""
    plain: dict[str, Any] = to_plain(record)
    return {**plain, "outcome": record.ending}


def _load_object(load: LoadReport) -> dict[str, Any]:
    """A load with its leader's counters beside the rest."""
    plain: dict[str, Any] = to_plain(load)
    counters: dict[str, Any] = plain.pop("totals")
    return plain | counters | {"demand_blocks": load.demand_blocks}


def state_object(state: ClusterState) -> dict[str, Any]:
    """``GET /kunserve/state``: the snapshot, each group with its load, plus what follows."""
    plain: dict[str, Any] = to_plain(state)
    for instance, shown in zip(state.instances, plain["instances"], strict=True):
        shown["dropped_bytes"] = instance.dropped_bytes
        shown["dropped_layers"] = instance.spec.num_layers - instance.held.num_layers
    for (group, load), shown in zip(state.loads_by_group(), plain["groups"], strict=True):
        shown["leader"] = group.leader
        shown["load"] = None if load is None else _load_object(load)
    del plain["loads"]
    plain["transitions"] = [record_object(record) for record in state.transitions]
    plain["dropped_bytes"] = sum(instance.dropped_bytes for instance in state.instances)
    return plain
