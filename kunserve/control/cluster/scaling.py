"""The cluster's size: instances ordered under overload, drained and given back after it.

An operator may ask for a size too. The cluster goes there by itself, and it does not shrink below
that size until somebody asks again.
"""

from collections.abc import Callable

from kunserve.control.cluster.commands import Outbox, ScaleUp
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.standing import Act, Standing
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.load import GroupLoad
from kunserve.core.snapshots import ClusterSize
from kunserve.policy.drop.monitor import ClusterLoadView
from kunserve.policy.drop.scale import (
    GIVE_BACK_HOLD_S,
    ScaleView,
    choose_leaver,
    instances_to_order,
    is_oversized,
)

SAY_PERIOD_S = 10.0
"""Shortest time between two wishes for instances that nobody may order, and how long one holds."""
NOT_STARTED = "an instance more could not be started"
"""How the reason begins that people are told."""
REFUSED_HOLD_S = 60.0
"""After an instance could not be started, the cluster orders none by itself for so long."""


class Scaling:
    """Knows what was ordered and who leaves."""

    def __init__(
        self,
        config: ClusterConfig,
        placement: Placement,
        requests: Requests,
        outbox: Outbox,
        give_back: Callable[[InstanceId], None],
        num_places: int | None = None,
    ) -> None:
        """``num_places``: instances that there are or are being started; None: as configured."""
        self._placement = placement
        self._requests = requests
        self._outbox = outbox
        self._give_back = give_back
        self._most = config.max_instances
        self._fewest = config.fewest_instances
        self._num_places = config.num_instances if num_places is None else num_places
        """Instances ready, dead and to be replaced, or ordered."""
        self._goal: int | None = None
        """A size that an operator asked for, until it is reached."""
        self._dismissed: set[GroupId] = set()
        """Those of the leaving that leave for the goal: a shortage does not keep them."""
        self._said_s: float | None = None
        self._wanted_s: float | None = None
        self._oversized_since_s: float | None = None
        self._refused: tuple[float, str] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the cluster may grow by itself."""
        return self._most is not None

    @property
    def _num_ordered(self) -> int:
        return max(0, self._num_places - len(self._placement.specs))

    @property
    def _num_wanted(self) -> int:
        return self._num_places - len(self._placement.leaving)

    def _surplus(self, goal: int) -> int:
        """How many more there are than the goal. What is ordered does not count, because it takes
        minutes or never comes: nobody who serves leaves for it.
        """
        return self._num_wanted - self._num_ordered - goal

    @property
    def _num_new(self) -> int:
        """Groups that nobody knows the load of yet. They may be who leaves, so one waits for it."""
        groups = self._placement.groups.values()
        return sum(bool(group.forming) or not group.is_reported for group in groups)

    @property
    def size(self) -> ClusterSize:
        """For people and metrics."""
        return ClusterSize(
            wanted=self._num_wanted if self._goal is None else self._goal,
            ordered=self._num_ordered,
            leaving=len(self._placement.leaving),
            fewest=self._fewest,
            most=self._most,
        )

    def is_wanted(self, now_s: float) -> bool:
        """Whether more instances would have helped lately."""
        return self._wanted_s is not None and now_s - self._wanted_s <= SAY_PERIOD_S

    def reason_texts(self, now_s: float) -> tuple[str, ...]:
        """Why the cluster is not as large as it was to be, for people."""
        if self._refused is None or now_s - self._refused[0] > REFUSED_HOLD_S:
            return ()
        return (f"{NOT_STARTED}: {self._refused[1]}",)

    # By hand

    def resize(self, num_instances: int) -> None:
        """An operator asks for so many. ``pursue`` goes there."""
        self._goal = self._fewest = num_instances
        self._oversized_since_s = self._refused = None

    def pursue(self) -> None:
        """Called at every tick: order what is missing of the goal, send away what is too much."""
        if self._goal is None:
            return
        placement = self._placement
        for group_id in sorted(placement.leaving):
            if self._surplus(self._goal) < 0:
                placement.mark(group_id, Standing.LEAVING, is_so=False)
        for instance_id in sorted(placement.absent):
            if self._surplus(self._goal) > 0:
                self._give_back(instance_id)
        missing = self._goal - self._num_wanted
        if missing > 0:
            self._order(missing, f"{self._goal} instances were asked for")
        for _ in range(self._surplus(self._goal) - self._num_new):
            departing = placement.standing_as(Standing.DEPARTING) - placement.leaving
            leaver = min(departing) if departing else choose_leaver(self._alone())
            if leaver is None:
                break  # those that could leave are in pipelines, or change
            placement.mark(leaver, Standing.LEAVING)
        self._dismissed = set(placement.leaving)
        if self._num_wanted == self._goal and not placement.leaving:
            self._goal = None
        self._dismiss_all()

    def lets_go(self, instance_id: InstanceId) -> bool:
        """An instance died: whether it is one too many, so that it needs no replacement."""
        placement = self._placement
        if self._goal is None or self._num_places - self._num_ordered <= self._goal:
            return False
        if self._surplus(self._goal) <= 0:  # another one was to leave: that one stays
            placement.mark(max(placement.leaving), Standing.LEAVING, is_so=False)
        return True

    # What becomes of orders

    def refused(self, reason: str, now_s: float) -> None:
        """An instance that was ordered could not be started, and will not be."""
        self._num_places -= 1
        self._refused = (now_s, reason)
        # Those that leave count, because they stay where that is what the goal needs.
        self._fewest = min(self._fewest, self._num_places)
        if self._goal is not None:
            self._goal = min(self._goal, self._num_places)

    def gave_back(self) -> None:
        """An instance has been given back."""
        self._num_places -= 1

    def keep_all(self) -> None:
        """Memory is short, or somebody died: nobody leaves but whom an operator sent away."""
        for group_id in sorted(self._placement.leaving - self._dismissed):
            self._placement.mark(group_id, Standing.LEAVING, is_so=False)
        self._oversized_since_s = None

    # By itself

    def grow(self, missing_blocks: int, reason: str, now_s: float) -> None:
        """Memory is short, and dropping does not help: order instances, or say so now and then."""
        self._wanted_s = now_s
        if not self.is_on:
            if self._said_s is None or now_s - self._said_s >= SAY_PERIOD_S:
                self._said_s = now_s
                self._outbox.append(ScaleUp(reason, is_wish=True))
            return
        if self._refused is not None and now_s - self._refused[0] <= REFUSED_HOLD_S:
            return
        if self._goal is None:
            self._order(instances_to_order(self._view(), missing_blocks), reason)

    def _order(self, count: int, reason: str) -> None:
        self._num_places += count
        for _ in range(count):
            self._outbox.append(ScaleUp(reason))

    def shrink(self, loads: ClusterLoadView, now_s: float) -> None:
        """Called when memory is not short: give back who has drained, and choose who leaves."""
        if not self.is_on:
            return
        self._dismiss_all()
        need = sum(load.need_blocks for load in loads.groups)
        num_waiting = sum(load.report.num_waiting for load in loads.groups)
        num_waiting += len(self._requests.backlog)
        is_whole = not self._placement.num_missing and self._goal is None
        if not is_whole or not is_oversized(self._view(), need, num_waiting):
            self._oversized_since_s = None
        elif self._oversized_since_s is None:
            self._oversized_since_s = now_s
        elif now_s - self._oversized_since_s >= GIVE_BACK_HOLD_S:
            leaver = choose_leaver(self._candidates())
            if leaver is not None:
                self._placement.mark(leaver, Standing.LEAVING)
                self._oversized_since_s = now_s

    def _dismiss_all(self) -> None:
        """Give back those of the leaving that are empty."""
        for group_id in self._placement.leaving:
            group = self._placement.groups[group_id]
            leader = group.layout.leader
            if Act.END in group.may and self._requests.num_at(leader) == 0:
                self._give_back(leader)

    def _candidates(self) -> list[GroupLoad]:
        """None while a group is dropped: restoring it comes first."""
        groups = self._placement.groups
        if any(len(group.layout.stages) > 1 for group in groups.values()):
            return []
        return self._alone()

    def _alone(self) -> list[GroupLoad]:
        """Groups of one instance that may be told to leave."""
        return [
            group.load
            for group in self._placement.that_may(Act.LEAVE)
            if group.is_reported and len(group.layout.stages) == 1
        ]

    def _view(self) -> ScaleView:
        placement = self._placement
        assert self._most is not None
        return ScaleView(
            num_instances=len(placement.specs) - len(placement.leaving),
            num_ordered=self._num_ordered,
            fewest=self._fewest,
            most=self._most,
            instance_blocks=min(
                (spec.kv_units // spec.num_layers for spec in placement.specs.values()), default=1
            ),
        )
