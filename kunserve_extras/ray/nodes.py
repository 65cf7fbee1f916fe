"""What the nodes of a Ray cluster have, and what instances need of them. No Ray in here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kunserve.cluster.processes.launch import FakeSettings
from kunserve.core.config import MIB, KunServeConfig
from kunserve.core.place import Place
from kunserve.engine.memory.free_memory import PROCESS_BYTES

Resources = Mapping[str, float]
"""By Ray's names: ``CPU``, ``GPU``, and ``memory`` in bytes."""
RACK_LABELS = ("rack", "topology.kubernetes.io/rack", "ray.io/availability-zone")
"""Of a node: the first that it has names its rack."""
GBPS_LABEL = "link-gbps"
"""What its network link carries."""


class Node(NamedTuple):
    """One node that lives."""

    ip: str
    resources: Resources
    """All that it has, whether somebody uses it or not."""


def need_of(config: KunServeConfig, fake: FakeSettings | None) -> dict[str, float]:
    """What Ray is to set aside for an instance.

    A GPU's memory is no resource of Ray's, so an instance on GPUs takes whole ones. Where only
    the KV memory is known before the model is, no memory is set aside. All ranks of an instance
    are on one node, so its actor asks for them together.
    """
    instance = config.instance
    num_ranks = instance.tensor_parallel_size
    need = {"CPU": float(max(instance.num_threads, num_ranks))}
    beside_bytes = num_ranks * PROCESS_BYTES
    if fake is not None:
        return need
    if instance.device != "cpu":
        return {**need, "GPU": float(num_ranks), "memory": float(beside_bytes)}
    if instance.kv_cache_memory_bytes is None:
        need["memory"] = float(instance.memory_bytes + beside_bytes)
    return need


def num_that_fit(nodes: Iterable[Node], need: Resources) -> int:
    """How many instances these nodes could hold if nobody else used them."""
    return sum(
        min(int(node.resources.get(name, 0.0) // amount) for name, amount in need.items())
        for node in nodes
    )


def shortage(nodes: Sequence[Node], need: Resources, num: int) -> str:
    """Why so many instances do not fit: what is asked for, and what there is."""
    asked = _shown(need)
    have = "; ".join(f"{node.ip}: {_shown(_parts(node.resources, need))}" for node in nodes[:8])
    more = f"; and {len(nodes) - 8} nodes more" if len(nodes) > 8 else ""
    return (
        f"{num} instances need {asked} each; the Ray cluster has {len(nodes)} nodes ({have}{more}),"
        f" which hold {num_that_fit(nodes, need)} of them"
    )


def place_of(ip: str, labels: Mapping[str, str]) -> Place:
    """Where a node with these labels stands."""
    rack = next((labels[name] for name in RACK_LABELS if labels.get(name)), "")
    try:
        link_gbps = float(labels[GBPS_LABEL])
    except (KeyError, ValueError):
        link_gbps = None
    return Place(ip, rack, link_gbps)


def _parts(resources: Resources, need: Resources) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in need}


def _shown(resources: Resources) -> str:
    return ", ".join(
        f"{amount / MIB:.0f} MiB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
    )
