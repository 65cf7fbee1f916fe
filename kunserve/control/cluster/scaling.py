"""The cluster's size: instances ordered under overload, drained and given back after it."""

from collections.abc import Callable

from kunserve.control.cluster.commands import Outbox, ScaleUp
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests import Requests
from kunserve.control.cluster.transitions import Transitions
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.load import GroupLoad
from kunserve.policy.monitor import ClusterLoadView
from kunserve.policy.scale import (
    GIVE_BACK_HOLD_S,
    ScaleView,
    choose_leaver,
    instances_to_order,
    is_oversized,
)

SAY_PERIOD_S = 10.0
"""Shortest time between two wishes for instances that nobody may order, and how long one holds."""


class Scaling:
    """Knows what was ordered and who leaves."""

    def __init__(
        self,
        config: ClusterConfig,
        placement: Placement,
        transitions: Transitions,
        requests: Requests,
        outbox: Outbox,
        give_back: Callable[[InstanceId], None],
    ) -> None:
        self._config = config
        self._placement = placement
        self._transitions = transitions
        self._requests = requests
        self._outbox = outbox
        self._give_back = give_back
        self._num_ordered = 0
        self._said_s: float | None = None
        self._wanted_s: float | None = None
        self._oversized_since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether the cluster may grow."""
        return self._config.max_instances is not None

    def is_wanted(self, now_s: float) -> bool:
        """Whether more instances would have helped lately."""
        return self._wanted_s is not None and now_s - self._wanted_s <= SAY_PERIOD_S

    def arrived(self) -> None:
        """An instance that was never here before is ready."""
        self._num_ordered = max(0, self._num_ordered - 1)

    def keep_all(self) -> None:
        """Memory is short, or somebody died: nobody leaves."""
        self._placement.keep_all()
        self._oversized_since_s = None

    def grow(self, missing_blocks: int, reason: str, now_s: float) -> None:
        """Memory is short, and dropping does not help: order instances, or say so now and then."""
        self._wanted_s = now_s
        if not self.is_on:
            if self._said_s is None or now_s - self._said_s >= SAY_PERIOD_S:
                self._said_s = now_s
                self._outbox.add(ScaleUp(reason))
            return
        count = instances_to_order(self._view(), missing_blocks)
        self._num_ordered += count
        for _ in range(count):
            self._outbox.add(ScaleUp(reason))

    def shrink(self, loads: ClusterLoadView, now_s: float) -> None:
        """Called when memory is not short: give back who has drained, and choose who leaves."""
        if not self.is_on:
            return
        for group_id in tuple(self._placement.leaving):
            self._dismiss_if_empty(group_id)
        need = sum(load.need_blocks for load in loads.groups)
        num_waiting = sum(load.report.num_waiting for load in loads.groups)
        num_waiting += len(self._requests.backlog)
        if not is_oversized(self._view(), need, num_waiting):
            self._oversized_since_s = None
        elif self._oversized_since_s is None:
            self._oversized_since_s = now_s
        elif now_s - self._oversized_since_s >= GIVE_BACK_HOLD_S:
            leaver = choose_leaver(self._candidates())
            if leaver is not None:
                self._placement.leave(leaver)
                self._oversized_since_s = now_s

    def _dismiss_if_empty(self, group_id: GroupId) -> None:
        group = self._placement.groups[group_id]
        leader = group.layout.leader
        if group_id not in self._transitions.busy_groups and self._requests.num_at(leader) == 0:
            self._give_back(leader)

    def _candidates(self) -> list[GroupLoad]:
        """None while a group is dropped: restoring it comes first."""
        groups = self._placement.groups
        if any(len(group.layout.stages) > 1 for group in groups.values()):
            return []
        return [
            group.load
            for group_id, group in groups.items()
            if group.is_reported and group_id not in self._placement.leaving
        ]

    def _view(self) -> ScaleView:
        placement = self._placement
        standing = [m for group in placement.groups.values() for m in group.layout.members]
        assert self._config.max_instances is not None
        return ScaleView(
            num_instances=len(standing) - len(placement.leaving),
            num_ordered=self._num_ordered,
            fewest=self._config.num_instances,
            most=self._config.max_instances,
            instance_blocks=min(
                (spec.kv_units // spec.num_layers for spec in placement.specs.values()), default=1
            ),
        )
