"""A rack is lost: who gives the survivors their layers, and over which links."""

from collections import defaultdict

import pytest

from kunserve.control.cluster.commands import Send
from kunserve.control.cluster.controller import Controller
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Committed,
    Connect,
    ExchangeDone,
    Form,
    Formed,
    Message,
    Prepared,
    Ready,
)
from kunserve.core.plan import Plan
from kunserve.core.transfer import PeerAddress
from tests.specs import instance_spec

NUM_LAYERS = 20
HALVES = (LayerRange(0, NUM_LAYERS // 2), LayerRange(NUM_LAYERS // 2, NUM_LAYERS))


class Lost:
    """Pairs behind whole instances; of each pair one dies."""

    def __init__(self, num_whole: int, num_pairs: int) -> None:
        self.controller = Controller(Plan(KunServeConfig()))
        self.pulls: dict[InstanceId, set[InstanceId]] = {}
        self.dead: set[InstanceId] = set()
        count = num_whole + 2 * num_pairs
        for number in map(InstanceId, range(count)):
            spec = instance_spec(number, NUM_LAYERS, 1000)
            self.controller.on(
                number,
                Ready(spec, PeerAddress(f"links {number}", f"bulk {number}"), 400, "fake"),
                0.0,
            )
        for taker, message in self.commands():
            if isinstance(message, Form):
                self.controller.on(taker, Formed(taker, message.layout.group_id, 0), 0.0)
        firsts = [InstanceId(number) for number in range(num_whole, count, 2)]
        for first in firsts:
            self.merge(first, InstanceId(first + 1))
        self.commands()
        for first in firsts:
            self.dead.add(first)
            self.controller.lost(first, "its rack is gone", 0.0)
            self.look()
        self.controller.check()

    def commands(self) -> list[tuple[InstanceId, Message]]:
        drained = self.controller.drain()
        return [(c.instance_id, c.message) for c in drained if isinstance(c, Send)]

    def merge(self, *pair: InstanceId) -> None:
        placement, transitions = self.controller.placement, self.controller.transitions
        old = tuple(group.layout for group in map(placement.with_member, pair) if group)
        new = GroupLayout(placement.new_ids(1), tuple(map(Stage, pair, HALVES)))
        (name,) = transitions.begin_drops([(old, new)], "test", 0.0)
        for member in pair:
            self.controller.on(member, Prepared(name, member, None), 0.0)
        for member, half in zip(pair, HALVES, strict=True):
            event = Committed(name, member, half, 0, 0, 0.0, 0.0, ())
            self.controller.on(member, event, 0.0)
        self.controller.on(pair[0], ExchangeDone(name, new.group_id, 0, 0, 0.0, 0.0), 0.0)

    def look(self) -> None:
        for instance_id, message in self.commands():
            if isinstance(message, Form):
                self.pulls[instance_id] = {
                    source.instance_id
                    for source in message.sources
                    if source.instance_id is not None
                }
            if isinstance(message, Connect):
                in_use = self.pulls.get(instance_id, set()) - self.dead
                assert not in_use & set(message.gone), "a link over which layers come is parted"


@pytest.mark.parametrize(("num_whole", "num_pairs"), [(200, 80), (400, 300)])
def test_all_that_have_the_layers_give_some_of_them(num_whole: int, num_pairs: int) -> None:
    lost = Lost(num_whole, num_pairs)
    assert len(lost.pulls) == num_pairs
    takers: defaultdict[InstanceId, int] = defaultdict(int)
    for sources in lost.pulls.values():
        for source in sources - lost.dead:
            takers[source] += 1
    assert len(takers) >= num_whole
    even = num_pairs * NUM_LAYERS // 2 / num_whole
    assert max(takers.values()) <= 2 * even + 2, "no more than twice an even share"
