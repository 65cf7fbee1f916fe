"""Which groups exist, who leads them, and what is known of their load. The one owner of both."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kunserve.control.cluster.standing import Act, Standing, allowed
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
    standing: frozenset[Standing] = frozenset()
    """What is true of it now; nothing while it only serves. ``Placement`` writes it."""
    may: Set[Act] = allowed(frozenset())
    """What follows from that."""
    forming: set[InstanceId] = field(default_factory=set)
    """Members that may still be loading weights."""
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

    def note_report(self, report: LoadReport, now_s: float) -> None:
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
        self.expected: dict[GroupId, Group] = {}
        """Groups that stand as soon as a commit under way is over: requests may wait for them."""
        self.version = 0
        """Changes whenever other groups may be sent requests than before."""
        self.num_sent: Counter[InstanceId] = Counter()
        """Requests sent to each instance, to match ``LoadReport.num_received``."""
        self._next_id = first_id
        self.reserved: GroupId | None = None
        """The group that is kept for a test."""
        self._of: dict[InstanceId, Group] = {}
        """Groups by their members."""
        self._candidates: tuple[int, list[Group]] = (-1, [])
        """As of a version."""

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
        old: Sequence[GroupLayout],
        new: Sequence[GroupLayout],
        leads: Mapping[InstanceId, int],
    ) -> None:
        """Groups become others; ``leads`` says how many requests with KV each new leader has."""
        self.unexpect(old, new)
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
        group = self.groups[layout.group_id] = self._group(layout)
        self._of.update(dict.fromkeys(layout.members, group))

    def _group(self, layout: GroupLayout) -> Group:
        blocks = group_capacity_blocks(layout, self.specs)
        undropped_blocks = undropped_capacity_blocks(layout, self.specs)
        nothing = LoadReport(layout.group_id, capacity_blocks=blocks)
        return Group(layout, blocks, undropped_blocks, nothing)

    def expect(self, old: Sequence[GroupLayout], new: Sequence[GroupLayout]) -> None:
        """Groups are about to become others."""
        self.version += 1
        reports = [self.groups[layout.group_id].report for layout in old]
        for layout in new:
            group = self._group(layout)
            group.report = inherited(layout.group_id, group.capacity_blocks, reports, 1, len(new))
            self.expected[layout.group_id] = group
        for layout in old:
            self.mark(layout.group_id, Standing.CLOSING)

    def unexpect(self, old: Iterable[GroupLayout], new: Iterable[GroupLayout]) -> None:
        """What was expected of these groups has come, or will not."""
        self.version += 1
        for layout in old:
            self.mark(layout.group_id, Standing.CLOSING, is_so=False)
        for layout in new:
            self.expected.pop(layout.group_id, None)

    def sent(self, group: Group, num_blocks: int) -> None:
        """A request of so many blocks is sent to the group."""
        self.num_sent[group.layout.leader] += 1
        group.sent(self.num_sent[group.layout.leader], num_blocks)

    def mark(self, group_id: GroupId, standing: Standing, *, is_so: bool = True) -> None:
        """Something is true of a group from now on, or no more. Of one that is gone nothing is."""
        group = self.groups.get(group_id)
        if group is None or (standing in group.standing) == is_so:
            return
        took = Act.TAKE in group.may
        group.standing ^= {standing}
        group.may = allowed(group.standing)
        self.version += took != (Act.TAKE in group.may)

    def standing_as(self, standing: Standing) -> set[GroupId]:
        """Groups of which this is true."""
        return {i for i, group in self.groups.items() if standing in group.standing}

    @property
    def leaving(self) -> set[GroupId]:
        """Groups whose instances are given back once empty."""
        return self.standing_as(Standing.LEAVING)

    @property
    def emptied(self) -> set[GroupId]:
        """Those, and groups whose instances end once empty: all that give their requests away."""
        return self.leaving | self.standing_as(Standing.DEPARTING)

    @property
    def migrating(self) -> set[GroupId]:
        """Groups that have a part in a live migration."""
        return self.standing_as(Standing.MIGRATING)

    @property
    def closing(self) -> set[GroupId]:
        """Groups in the middle of a commit."""
        return self.standing_as(Standing.CLOSING)

    def reserve(self, group_id: GroupId | None) -> None:
        """Keep a group for suspects, or let it be as any other."""
        if self.reserved is not None and self.reserved != group_id:
            self.mark(self.reserved, Standing.TESTING, is_so=False)
        self.reserved = group_id
        if group_id is not None:
            self.mark(group_id, Standing.TESTING)

    def begin_forming(self, group_id: GroupId) -> None:
        """Its members are told to form the group from nothing."""
        self.groups[group_id].forming = set(self.groups[group_id].layout.members)
        self.mark(group_id, Standing.FORMING)

    def formed(self, group_id: GroupId, instance_id: InstanceId) -> None:
        """A member has all its weights; the group can take requests once all have."""
        group = self.groups.get(group_id)
        if group is not None and group.forming:
            group.forming.discard(instance_id)
            self.mark(group_id, Standing.FORMING, is_so=bool(group.forming))

    def forget(self, instance_id: InstanceId) -> None:
        """The instance, which stands in no group, will not come back."""
        self.version += 1  # a test of a suspect waits while anybody is missing
        del self.specs[instance_id]

    @property
    def absent(self) -> set[InstanceId]:
        """Instances that were ready once and stand in no group: they have died."""
        return self.specs.keys() - self._of.keys()

    @property
    def num_missing(self) -> int:
        """Instances that were ready once and stand in no group that can take requests now."""
        return len(self.specs) - sum(
            len(group.layout.stages) for group in self.groups.values() if not group.forming
        )

    def candidates(self) -> list[Group]:
        """Groups that may be sent requests."""
        if self._candidates[0] != self.version:
            self._candidates = (self.version, self.that_may(Act.TAKE))
        return self._candidates[1]

    def that_may(self, act: Act) -> list[Group]:
        """Groups that may do this now."""
        return [group for group in self.groups.values() if act in group.may]

    def may(self, group_id: GroupId, act: Act) -> bool:
        """Whether the group stands, and may do this now."""
        group = self.groups.get(group_id)
        return group is not None and act in group.may

    def candidates_led_by(self, leaders: Set[InstanceId]) -> list[Group]:
        """Those of ``candidates`` that these instances lead."""
        led = (self.led_by(leader) for leader in sorted(leaders))
        return [group for group in led if group is not None and Act.TAKE in group.may]

    def remove(self, layouts: Iterable[GroupLayout]) -> None:
        """Groups that stand no longer (unknown ones are fine)."""
        layouts = tuple(layouts)
        self.version += 1
        for layout in layouts:
            if layout.group_id == self.reserved:
                self.reserved = None
            group = self.groups.pop(layout.group_id, None)
            for member in layout.members:
                if group is not None and self._of.get(member) is group:
                    del self._of[member]

    def led_by(self, instance_id: InstanceId) -> Group | None:
        """The group that the instance leads."""
        group = self._of.get(instance_id)
        return group if group is not None and group.layout.leader == instance_id else None

    def with_member(self, instance_id: InstanceId) -> Group | None:
        """The group that the instance belongs to."""
        return self._of.get(instance_id)

    def has_lost(self, instance_id: InstanceId) -> bool:
        """Whether all that the instance ran is lost: it has died, or forms a group from nothing."""
        group = self._of.get(instance_id)
        return group is None or instance_id in group.forming

    def specs_of(self, layouts: Iterable[GroupLayout]) -> tuple[InstanceSpec, ...]:
        """The makes of all members, in order."""
        return tuple(self.specs[member] for layout in layouts for member in layout.members)

    def check(self) -> None:
        """Every instance stands in at most one group, and every group is whole."""
        tested = {self.reserved} - {None}
        assert tested == self.standing_as(Standing.TESTING), (tested, self.groups.keys())
        forming = {i for i, group in self.groups.items() if group.forming}
        assert forming == self.standing_as(Standing.FORMING), forming
        assert self.candidates() == self.that_may(Act.TAKE), self.version
        assert not self.expected.keys() & self.groups.keys(), self.expected
        seen: set[InstanceId] = set()
        for group in self.groups.values():
            num_layers = self.specs[group.layout.leader].num_layers
            group.layout.check(num_layers)
            assert not seen & set(group.layout.members), (seen, group.layout)
            seen |= set(group.layout.members)
            assert all(self._of[member] is group for member in group.layout.members), group.layout
        assert seen == self._of.keys(), (seen, self._of.keys())
