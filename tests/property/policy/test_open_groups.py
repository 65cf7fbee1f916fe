"""Groups that requests may be sent to: choices beside somebody who keeps the account himself."""

from collections.abc import Set
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import REQUESTS_AHEAD, SentAhead
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.requests.open_groups import OpenGroups
from kunserve.control.cluster.standing import Standing
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.policy.dispatch.choice import choose_group
from kunserve_lab.world.fake_body import fake_spec

NUM_LAYERS = 4
NUM_INSTANCES = 6
STEP_TOKENS = 4
PROMPT_TOKENS = 6


class World:
    """A placement to which everything happens that can, and whoever follows it."""

    def __init__(self) -> None:
        self.placement = Placement()
        self.ahead = SentAhead(STEP_TOKENS)
        self.groups = OpenGroups(self.placement, self.ahead)
        self.priority = 0
        """Of the requests that come now."""
        self.now_s = 0.0
        self.num_live = 0
        self.live: list[Live] = []
        self.num_promised: dict[GroupId, int] = {}
        self.commits: list[tuple[list[GroupLayout], list[GroupLayout]]] = []
        """Under way: what becomes what."""
        for number in range(NUM_INSTANCES):
            instance_id = InstanceId(number)
            blocks = 40 if number < 4 else 60
            spec = fake_spec(instance_id, NUM_LAYERS, blocks * NUM_LAYERS, layer_bytes=3200)
            self.placement.specs[instance_id] = spec
            self.placement.add(self.layout(number))

    def layout(self, *members: int) -> GroupLayout:
        share = NUM_LAYERS // len(members)
        stages = [
            Stage(InstanceId(member), LayerRange(place * share, (place + 1) * share))
            for place, member in enumerate(members)
        ]
        return GroupLayout(self.placement.new_ids(1), tuple(stages))

    def happen(self, what: str, which: int, size: int) -> None:
        """``which`` and ``size`` choose among what is possible."""
        placement = self.placement
        self.now_s += 0.1
        chosen = sorted(placement.groups)[which % len(placement.groups)]
        group = placement.groups[chosen]
        match what:
            case "report":
                waiting = size % 3
                report = LoadReport(
                    chosen,
                    group.report.sequence_number + 1,
                    num_received=which,
                    used_blocks=size,
                    num_waiting=waiting,
                    head_of_line_blocks=waiting and 2,
                    waiting_blocks=5 * waiting,
                )
                group.note_report(report, self.now_s)
            case "sent":
                group.sent(which, size % 9 + 1)
            case "ahead":
                live = self.request()
                live.leader = group.layout.leader
                self.ahead.add(live)
                self.live.append(live)
            case "priority":
                self.priority = which % 3
            case "computed" if self.live:
                self.ahead.remove(self.live.pop(which % len(self.live)))
            case "returning":
                group.asked_back(size % 3, size, self.now_s)
            case "leave":
                is_so = chosen not in placement.leaving
                placement.mark(chosen, Standing.LEAVING, is_so=is_so)
            case "reserve":
                placement.reserve(None if size % 2 else chosen)
            case "again" if not placement.closing:
                placement.remove((group.layout,))
                for member in group.layout.members:
                    layout = self.layout(member)
                    placement.add(layout)
                    placement.begin_forming(layout.group_id)
            case "formed":
                for member in group.layout.members:
                    placement.formed(chosen, member)
            case "expect":
                self.expect(chosen)
            case "end":
                self.end(size)

    def request(self) -> Live:
        self.num_live += 1
        name, prompt = RequestId(str(self.num_live)), TokenIds([1] * PROMPT_TOKENS)
        request = Request(name, prompt, SamplingParams(max_tokens=4), 0.0)
        request = replace(request, priority=self.priority)
        return Live(self.num_live, request, print, [], 0.0)

    def expect(self, chosen: GroupId) -> None:
        """Two instances are to become a group, or a group of two is to part."""
        placement = self.placement
        free = [i for i, g in sorted(placement.groups.items()) if i not in placement.closing]
        if chosen not in free:
            return
        layout = placement.groups[chosen].layout
        if len(layout.members) == 2:
            self.begin([layout], [self.layout(member) for member in layout.members])
            return
        single = [i for i in free if i != chosen and len(placement.groups[i].layout.members) == 1]
        if single:
            other = placement.groups[single[0]].layout
            self.begin([layout, other], [self.layout(*layout.members, *other.members)])

    def begin(self, old: list[GroupLayout], new: list[GroupLayout]) -> None:
        self.commits.append((old, new))
        self.placement.expect(old, new)

    def end(self, size: int) -> None:
        """The oldest commit under way is over, or has failed."""
        placement = self.placement
        assert placement.closing == {one.group_id for old, _ in self.commits for one in old}
        if not self.commits:
            return
        old, new = self.commits.pop(0)
        if size % 3:
            placement.replace(old, new, {layout.leader: 1 for layout in new})
        else:
            placement.unexpect(old, new)

    def has_room(self, group: Group) -> bool:
        """Counted anew: what is ahead of a request, and of all who are there."""
        led = [live for live in self.live if live.leader == group.layout.leader]
        before = [live for live in led if live.request.priority <= self.priority]
        num_tokens = sum(live.tokens_ahead for live in before)
        most = self.ahead.most_tokens(len(group.layout.stages))
        return len(before) < REQUESTS_AHEAD or num_tokens < most

    def look(self, leaders: Set[InstanceId] | None, sizes: list[int], steps: list[int]) -> None:
        """Choose for some requests, one after the other, beside who goes through all groups."""
        placement = self.placement
        if leaders is None:
            candidates = placement.candidates()
        else:
            candidates = placement.candidates_led_by(leaders)
        roomy = {group.layout.group_id: group for group in candidates if self.has_room(group)}
        loads: dict[GroupId, GroupLoad] = {i: group.load for i, group in roomy.items()}
        loads |= {i: group.load for i, group in placement.expected.items()}
        self.num_promised = {}
        assert self.groups.look_at(self.priority, leaders) == bool(roomy)
        for blocks, step in zip(sizes, steps, strict=False):
            self.priority += step
            self.groups.narrow(self.priority)
            for group_id in [i for i, group in roomy.items() if not self.has_room(group)]:
                del roomy[group_id], loads[group_id]
            assert self.groups.has_room == bool(roomy)
            expected = choose_group(loads.values(), blocks) if roomy else None
            assert choose_group(self.groups.loads.values(), blocks) == expected
            if expected is None:
                continue
            loads[expected] = sent_to(loads[expected], blocks)
            if expected in placement.expected:
                self.groups.promise(expected, blocks, PROMPT_TOKENS)
                self.num_promised[expected] = self.num_promised.get(expected, 0) + 1
                if self.is_full(expected):
                    del loads[expected]
                continue
            group = roomy[expected]
            self.happen("ahead", sorted(placement.groups).index(expected), 0)
            group.sent(1 << 30, blocks)
            self.groups.sent(group)
            if not self.has_room(group):
                del roomy[expected], loads[expected]

    def is_full(self, group_id: GroupId) -> bool:
        num_stages = len(self.placement.expected[group_id].layout.stages)
        num_tokens = PROMPT_TOKENS * self.num_promised[group_id]
        return num_tokens >= self.ahead.most_tokens(num_stages)


def sent_to(load: GroupLoad, num_blocks: int) -> GroupLoad:
    """As it is known once so much has been sent."""
    blocks, num = load.unreported_blocks + num_blocks, load.num_unreported + 1
    return replace(load, unreported_blocks=blocks, num_unreported=num)


KINDS = (
    *("report", "sent", "ahead", "ahead", "computed", "returning", "leave", "reserve", "again"),
    *("formed", "formed", "expect", "expect", "end", "priority"),
)
happenings = st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 60))
looks = st.tuples(
    st.none() | st.sets(st.integers(0, NUM_INSTANCES - 1).map(InstanceId)),
    st.lists(st.integers(1, 70), max_size=12),
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=12, max_size=12),
    st.integers(0, 2),
)


@given(st.lists(st.one_of(happenings, happenings, looks), max_size=40))
def test_choices_are_among_those_that_have_room(events: list[tuple[Any, ...]]) -> None:
    world = World()
    for event in events:
        if len(event) == 3:
            world.happen(*event)
        else:
            *look, world.priority = event
            world.look(*look)
    world.placement.check()
    world.look(None, [1, 5, 30], [0, 1, 0])
