"""Which groups exist, who leads them, and what is known of their load. The one owner of both."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import GroupLoad, LoadReport, inherited
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop.capacity import group_capacity_blocks, undropped_capacity_blocks

STEP_MEMORY_S = 120.0
"""Time constant with which the longest gap between reports is forgotten."""
RATE_WEIGHT = 0.1
"""Of each report in the smoothed prompt rate: about a second at ten reports a second."""


@dataclass(slots=True)
class Group:
    """One group, its last report, and what was sent to it since."""

    layout: GroupLayout
    capacity_blocks: int
    undropped_blocks: int
    """Room for blocks if each member held the whole model."""
    report: LoadReport
    """The leader's last; all zeros before its first."""
    unreported: deque[tuple[int, int]] = field(default_factory=deque)
    """(number of the submission to the leader, blocks), oldest first."""
    unreported_blocks: int = 0
    forming: set[InstanceId] = field(default_factory=set)
    """Members that may still be loading weights: no request is sent to the group."""
    num_returning: int = 0
    returning_blocks: int = 0
    """Waiting requests that were asked back, until a report shows that they are gone."""
    asked_s: float = 0.0
    is_returned: bool = False
    """Whether they have come: the next report knows of it."""
    prompt_tokens_per_s: float = 0.0
    """Lately computed, for Retry-After."""
    step_s: float = 0.0
    """Longest gap between two reports lately: leaders report between steps only."""
    _reported_s: float | None = None
    _load: GroupLoad | None = None

    def sent(self, number: int, blocks: int) -> None:
        """Account for a request that the next report may not include yet."""
        self.unreported.append((number, blocks))
        self.unreported_blocks += blocks
        self._load = None

    def take(self, report: LoadReport, now_s: float) -> None:
        """Take the leader's word; what it has received is in it."""
        if self._reported_s is not None and now_s > self._reported_s:
            gap_s = now_s - self._reported_s
            self.step_s = max(gap_s, self.step_s * math.exp(-gap_s / STEP_MEMORY_S))
            rate = (report.totals.prompt_tokens - self.report.totals.prompt_tokens) / gap_s
            self.prompt_tokens_per_s += RATE_WEIGHT * (rate - self.prompt_tokens_per_s)
        self.report = report
        self._reported_s = now_s
        if self.is_returned:
            self.num_returning = self.returning_blocks = 0
            self.is_returned = False
        while self.unreported and self.unreported[0][0] <= report.num_received:
            self.unreported_blocks -= self.unreported.popleft()[1]
        self._load = None

    def asked_back(self, num_requests: int, num_blocks: int, now_s: float) -> None:
        """The leader is told to return so many waiting requests."""
        self.num_returning, self.returning_blocks = num_requests, num_blocks
        self.asked_s = now_s
        self.is_returned = False
        self._load = None

    @property
    def is_reported(self) -> bool:
        """Whether the leader has reported yet."""
        return self._reported_s is not None

    @property
    def is_clear(self) -> bool:
        """Whether nothing is left of any request, as far as the leader has told."""
        report = self.report
        num_there = report.num_running + report.num_waiting + report.num_stalled
        return num_there == 0 and not self.unreported

    @property
    def load(self) -> GroupLoad:
        """As policies see it: the same value until something is sent or reported."""
        if self._load is None:
            self._load = GroupLoad(
                report=self.report,
                capacity_blocks=self.capacity_blocks,
                num_instances=len(self.layout.stages),
                undropped_blocks=self.undropped_blocks,
                num_unreported=len(self.unreported),
                unreported_blocks=self.unreported_blocks,
                num_returning=self.num_returning,
                returning_blocks=self.returning_blocks,
                prompt_tokens_per_s=self.prompt_tokens_per_s,
            )
        return self._load


class Placement:
    """Groups by id and by leader."""

    def __init__(self, first_id: int = 0) -> None:
        self.specs: dict[InstanceId, InstanceSpec] = {}
        self.groups: dict[GroupId, Group] = {}
        self.leaving: set[GroupId] = set()
        """Groups that get no more requests: their instances are given back once empty."""
        self.migrating: set[GroupId] = set()
        """Groups that have a part in a live migration."""
        self.expected: dict[GroupId, Group] = {}
        """Groups that stand as soon as a commit under way is over: requests may wait for them."""
        self._closing: dict[GroupId, tuple[GroupId, ...]] = {}
        """Groups that become others in that commit: they get no more requests."""
        self.reserved: GroupId | None = None
        """Gets one request at a time, which runs alone."""
        self.version = 0
        """Changes whenever other groups may be sent requests than before."""
        self._next_id = first_id
        self._led: dict[InstanceId, Group] = {}
        """Groups by their leaders."""

    @property
    def next_id(self) -> GroupId:
        """The first group id never used before: a plan numbers from it, ``new_ids`` takes them."""
        return GroupId(self._next_id)

    def new_ids(self, count: int) -> GroupId:
        """The first of ``count`` group ids never used before."""
        first = self._next_id
        self._next_id += count
        return GroupId(first)

    def replace(
        self,
        old: Iterable[GroupLayout],
        new: Iterable[GroupLayout],
        leads: Mapping[InstanceId, int],
    ) -> None:
        """Groups become others; ``leads`` says how many requests with KV each new leader has."""
        self.unexpect(old)
        reports = [self.groups[layout.group_id].report for layout in old]
        step_s = max(self.groups[layout.group_id].step_s for layout in old)
        self.remove(old)
        whole = sum(leads.values())
        for layout in new:
            self.add(layout)
            group = self.groups[layout.group_id]
            group.step_s = step_s
            part = leads.get(layout.leader, 0)
            group.report = inherited(layout.group_id, group.capacity_blocks, reports, part, whole)

    def add(self, layout: GroupLayout) -> None:
        """A group that stands now, with nothing in it."""
        self.version += 1
        group = self._group(layout)
        self.groups[layout.group_id] = self._led[layout.leader] = group

    def _group(self, layout: GroupLayout) -> Group:
        blocks = group_capacity_blocks(layout, self.specs)
        undropped_blocks = undropped_capacity_blocks(layout, self.specs)
        nothing = LoadReport(layout.group_id, capacity_blocks=blocks)
        return Group(layout, blocks, undropped_blocks, nothing)

    def expect(self, old: Iterable[GroupLayout], new: Iterable[GroupLayout]) -> None:
        """Groups are about to become others."""
        old, new = tuple(old), tuple(new)
        self.version += 1
        reports = [self.groups[layout.group_id].report for layout in old]
        for layout in new:
            group = self._group(layout)
            group.report = inherited(layout.group_id, group.capacity_blocks, reports, 1, len(new))
            self.expected[layout.group_id] = group
        for layout in old:
            self._closing[layout.group_id] = tuple(layout.group_id for layout in new)

    def unexpect(self, old: Iterable[GroupLayout]) -> None:
        """What was expected of these groups has come, or will not."""
        for layout in old:
            new_ids = self._closing.pop(layout.group_id, ())
            self.version += 1
            for group_id in new_ids:
                self.expected.pop(group_id, None)

    def reserve(self, group_id: GroupId | None) -> None:
        """Keep a group for one request that runs alone, or let it be as any other."""
        if group_id != self.reserved:
            self.version += 1
            self.reserved = group_id

    def leave(self, group_id: GroupId) -> None:
        """The group gets no more requests."""
        self.version += 1
        self.leaving.add(group_id)

    def stay(self, group_id: GroupId) -> None:
        """The group leaves no more: it may be sent requests again."""
        self.version += 1
        self.leaving.discard(group_id)

    def formed(self, group_id: GroupId, instance_id: InstanceId) -> None:
        """A member has all its weights; the group can take requests once all have."""
        group = self.groups.get(group_id)
        if group is not None and group.forming:
            group.forming.discard(instance_id)
            self.version += 1

    @property
    def closing(self) -> Set[GroupId]:
        """Groups in the middle of a commit."""
        return self._closing.keys()

    @property
    def unready(self) -> set[GroupId]:
        """Groups that must not change now: they form, or one request runs alone there."""
        forming = {group_id for group_id, group in self.groups.items() if group.forming}
        return forming if self.reserved is None else forming | {self.reserved}

    def forget(self, instance_id: InstanceId) -> None:
        """The instance, which stands in no group, will not come back."""
        self.version += 1  # a test of a suspect waits while anybody is missing
        del self.specs[instance_id]

    @property
    def absent(self) -> set[InstanceId]:
        """Instances that were ready once and stand in no group: they have died."""
        return self.specs.keys() - {m for g in self.groups.values() for m in g.layout.members}

    @property
    def num_missing(self) -> int:
        """Instances that were ready once and stand in no group that can take requests now."""
        return len(self.specs) - sum(
            len(group.layout.stages) for group in self.groups.values() if not group.forming
        )

    def candidates(self, *, is_reserved: bool = False) -> list[Group]:
        """Groups that stand and may be sent a request; the reserved one too if asked for."""
        reserved = None if is_reserved else self.reserved
        barred = {*self.leaving, *self._closing, *(() if reserved is None else (reserved,))}
        return [
            group
            for group_id, group in self.groups.items()
            if not group.forming and group_id not in barred
        ]

    def takes(self, group_id: GroupId) -> bool:
        """Whether the group is one of ``candidates``."""
        group = self.groups.get(group_id)
        barred = group_id in self.leaving or group_id in self._closing
        return group is not None and not group.forming and not barred and group_id != self.reserved

    def candidates_led_by(self, leaders: Set[InstanceId]) -> list[Group]:
        """Those of ``candidates`` that these instances lead."""
        barred = {*self.leaving, *self._closing, self.reserved}
        led = [self._led[leader] for leader in sorted(leaders) if leader in self._led]
        return [g for g in led if not g.forming and g.layout.group_id not in barred]

    def remove(self, layouts: Iterable[GroupLayout]) -> None:
        """Groups that stand no longer (unknown ones are fine)."""
        layouts = tuple(layouts)
        self.version += 1
        for layout in layouts:
            if layout.group_id == self.reserved:
                self.reserved = None
            group = self.groups.pop(layout.group_id, None)
            if group is not None and self._led.get(layout.leader) is group:
                del self._led[layout.leader]
            self.leaving.discard(layout.group_id)

    def led_by(self, instance_id: InstanceId) -> Group | None:
        """The group that the instance leads."""
        return self._led.get(instance_id)

    def with_member(self, instance_id: InstanceId) -> Group | None:
        """The group that the instance belongs to."""
        for group in self.groups.values():
            if instance_id in group.layout.members:
                return group
        return None

    def specs_of(self, layouts: Iterable[GroupLayout]) -> tuple[InstanceSpec, ...]:
        """The makes of all members, in order."""
        return tuple(self.specs[member] for layout in layouts for member in layout.members)

    def check(self) -> None:
        """Every instance stands in at most one group, and every group is whole."""
        assert self.leaving <= self.groups.keys(), self.leaving
        assert self.reserved is None or self.reserved in self.groups, self.reserved
        assert self._closing.keys() <= self.groups.keys(), self._closing
        assert not self.expected.keys() & self.groups.keys(), self.expected
        assert len(self._led) == len(self.groups), self._led.keys()
        seen: set[InstanceId] = set()
        for group in self.groups.values():
            assert self._led[group.layout.leader] is group, group.layout
            num_layers = self.specs[group.layout.leader].num_layers
            group.layout.check(num_layers)
            assert not seen & set(group.layout.members), (seen, group.layout)
            seen |= set(group.layout.members)
