"""What drops have saved: requests that run in memory which was weights before."""

from collections.abc import Mapping

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import LoadReport
from kunserve.core.snapshots import ClusterState, InstanceSpec
from kunserve.server.cluster_metrics import loads_by_group


def requests_in_freed_memory(
    layout: GroupLayout, load: LoadReport, specs: Mapping[InstanceId, InstanceSpec]
) -> float:
    """Running requests of a group that its members could not hold undropped, an estimate.

    The group's used blocks beyond the undropped capacity of its members, as a share of all used
    blocks, times the requests that hold them. Undropped, so many requests would wait.
    """
    undropped = sum(
        specs[member].blocks_when_holding(specs[member].num_layers) for member in layout.members
    )
    beyond = load.used_blocks - undropped
    if beyond <= 0:
        return 0.0
    return (load.num_running + load.num_stalled) * beyond / load.used_blocks


class Savings:
    """Adds up the queueing that drops have avoided. Fed with every sample of the state."""

    def __init__(self) -> None:
        self.num_requests = 0.0
        """Requests that run in freed memory now."""
        self.request_s = 0.0
        """Seconds of waiting avoided so far, summed over requests."""
        self._last_s: float | None = None

    def observe(self, state: ClusterState) -> None:
        """Take a sample: what held at the last one held until now."""
        if self._last_s is not None:
            self.request_s += self.num_requests * max(0.0, state.now_s - self._last_s)
        self._last_s = state.now_s
        specs = {instance.spec.instance_id: instance.spec for instance in state.instances}
        self.num_requests = 0.0
        for layout, load in loads_by_group(state):
            if load is not None and all(member in specs for member in layout.members):
                self.num_requests += requests_in_freed_memory(layout, load, specs)
