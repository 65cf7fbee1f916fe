"""A Ray cluster of several nodes on this machine, small and quiet."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import wait_until

MIB = 1 << 20
QUIET = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""No worker is started before somebody needs it."""
SMALL = {"include_dashboard": False, "object_store_memory": 80 * MIB}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A head and one node beside it, each with room for an instance, in two racks.

    A node takes seconds to start, so all tests use these. One that kills a node adds its own.
    """
    os.environ.update(QUIET)
    utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "memory": 4096 * MIB, "labels": {"rack": "left"}, **SMALL}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    Nodes(cluster).add(rack="right")
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def session(ray_cluster: Any) -> Iterator[Any]:
    """This process's connection."""
    from kunserve_extras.ray.session import Session

    made = Session(ray_cluster.address)
    yield made
    made.close()


class Nodes:
    """Those that a test adds."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.living: list[Any] = []

    def add(self, num_cpus: int = 1, **labels: str) -> Any:
        for attempt in range(
            3
        ):  # a busy machine starts none within the half minute that Ray allows
            with contextlib.suppress(Exception if attempt < 2 else ()):
                node = self.cluster.add_node(
                    num_cpus=num_cpus, memory=4096 * MIB, labels=labels or None, **SMALL
                )
                self.living.append(node)
                return node

    def kill(self, node: Any) -> None:
        """All of its processes, at once, as when a machine loses its power."""
        self.living.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes(ray_cluster: Any, session: Any) -> Iterator[Nodes]:
    """Removed at the end. Ray notices some seconds later, and the next test must not count them."""
    made = Nodes(ray_cluster)
    yield made
    for node in list(made.living):
        made.kill(node)
    wait_until(lambda: len(session.nodes()) == 2, 60.0)
