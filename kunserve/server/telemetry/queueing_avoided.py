"""What drops have saved, and how long: requests that run in memory which was weights before."""

from collections.abc import Mapping

from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import LoadReport
from kunserve.core.snapshots import ClusterState, InstanceSpec
from kunserve.server.telemetry.metric_row import Row, by_engine, counter, gauge


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


class QueueingAvoided:
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
        for layout, load in state.loads_by_group():
            if load is not None and all(member in specs for member in layout.members):
                self.num_requests += requests_in_freed_memory(layout, load, specs)


class DroppedTime:
    """Adds up how long each instance has had dropped layers. Fed with every sample of the state."""

    def __init__(self) -> None:
        self.seconds: dict[InstanceId, float] = {}
        self.share_seconds: dict[InstanceId, float] = {}
        self._dropped_share: dict[InstanceId, float] = {}
        """At the last sample; only of those that live."""
        self._last_s: float | None = None

    def observe(self, state: ClusterState) -> None:
        """Take a sample: what held at the last one held until now."""
        elapsed_s = 0.0 if self._last_s is None else max(0.0, state.now_s - self._last_s)
        self._last_s = state.now_s
        for instance_id, share in self._dropped_share.items():
            self.seconds[instance_id] += elapsed_s * (share > 0.0)
            self.share_seconds[instance_id] += elapsed_s * share
        self._dropped_share = {
            one.spec.instance_id: 1.0 - one.held.num_layers / one.spec.num_layers
            for one in state.instances
            if one.alive
        }
        for instance_id in self._dropped_share:
            self.seconds.setdefault(instance_id, 0.0)
            self.share_seconds.setdefault(instance_id, 0.0)


AVOIDED_ROWS: tuple[Row[QueueingAvoided], ...] = (
    gauge(
        "kunserve:requests_in_freed_memory",
        "Requests that run now and would wait without the drops, an estimate.",
        lambda avoided: avoided.num_requests,
    ),
    counter(
        "kunserve:queueing_avoided_seconds_total",
        "Seconds of waiting that drops have avoided, summed over requests, an estimate.",
        lambda avoided: avoided.request_s,
    ),
)
DROPPED_ROWS: tuple[Row[DroppedTime], ...] = (
    counter(
        "kunserve:dropped_seconds_total",
        "Time in which the instance had dropped layers.",
        lambda dropped: by_engine(dropped.seconds),
        "engine",
    ),
    counter(
        "kunserve:dropped_share_seconds_total",
        "The same, each second times the share of its layers that were dropped.",
        lambda dropped: by_engine(dropped.share_seconds),
        "engine",
    ),
)
