"""NUMA nodes of this machine, and which of them a rank computes on."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")


def numa_nodes(root: Path = _NODES) -> list[frozenset[int]]:
    """The processors of each node, those only that this process may use; no node without one."""
    allowed = os.sched_getaffinity(0)
    found = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            cpus = _cpus_in((folder / "cpulist").read_text(encoding="ascii")) & allowed
            if cpus:
                found.append(frozenset(cpus))
    return found


def _cpus_in(text: str) -> set[int]:
    """From a list such as ``0-3,8,10-11``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def place_ranks(
    instance: int, num_ranks: int, nodes: Sequence[frozenset[int]]
) -> list[frozenset[int] | None]:
    """The processors of each rank: of one node. None, where there is one node: any.

    Ranks are spread over all nodes. Where an instance has fewer ranks than there are nodes, the
    next instance takes the next ones.
    """
    if len(nodes) < 2:
        return [None] * num_ranks
    return [nodes[number] for number in node_numbers(instance, num_ranks, len(nodes))]


def node_numbers(instance: int, num_ranks: int, num_nodes: int) -> list[int]:
    """The node of each rank, see ``place_ranks``."""
    if num_ranks >= num_nodes:
        return [rank * num_nodes // num_ranks for rank in range(num_ranks)]
    return [(instance * num_ranks + rank) % num_nodes for rank in range(num_ranks)]


def stay_on(cpus: frozenset[int] | None) -> None:
    """Compute there from now on, and take memory there: threads that are started inherit it."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def stay_on_one(instance: int, num_threads: int, nodes: Sequence[frozenset[int]]) -> None:
    """An instance of one rank computes on one node, where its memory is then too; the next
    instance on the next. Not if it has more threads than the node has processors.
    """
    (cpus,) = place_ranks(instance, 1, nodes)
    if cpus is None or num_threads <= len(cpus):
        stay_on(cpus)
        return
    logger.warning(
        "an instance of %d threads spans NUMA nodes of %d cores, and memory of another node is "
        "slow: --tensor-parallel-size gives it a rank on each",
        num_threads,
        len(cpus),
    )


@contextlib.contextmanager
def visiting(cpus: frozenset[int] | None) -> Iterator[None]:
    """Within, this thread takes memory where these processors are."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
