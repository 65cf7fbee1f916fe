"""A cluster of fake instances with bad disks, transfers that hang, and pairs that do not meet.

Its faults last until the test ends them. ``endure`` lets fair time pass: everything happens soon
that no fault holds back, and a ``LivenessWatch`` looks whether each wait comes to its end.
"""

from collections.abc import Iterable
from typing import Any

from kunserve.cluster.instance.prepare_gate import PrepareGate
from kunserve.core.ids import InstanceId
from kunserve.core.messages import (
    Connect,
    EndMigration,
    Form,
    LateContact,
    LinkBroken,
    Message,
    Migrate,
    Prepare,
    Rollback,
)
from kunserve_lab.world.actions import Action, CompletePull, Delivery
from kunserve_lab.world.by_choice import ChosenMember
from kunserve_lab.world.mover import Pull
from kunserve_lab.world.world import Address
from tests.fake_cluster import FakeCluster
from tests.liveness import LivenessWatch

TURN_S = 0.5
"""Fair time passes in turns."""
ROUNDS = 4
"""In a turn everything that may happen does, so often."""
SILENT_PULL_S = 20.0
"""A pull of which nothing comes has failed."""
SLOW_PULL_S = 200.0
"""A slow pull takes so long from the moment at which it becomes slow."""
LINK_S = 1.0
"""After so long an instance says that a connection is gone."""
FIRST_S = 2.0 * LINK_S
"""It waits for so long for one that has never stood."""


class FaultyCluster(FakeCluster):
    """An in-process cluster with faults that last."""

    def __init__(self, **settings: Any) -> None:
        """As ``FakeCluster``."""
        self.bad_disks: set[InstanceId] = set()
        """Instances whose loads never end."""
        self.stuck: list[Pull] = []
        """Of these nothing comes."""
        self.slow: dict[Pull, float] = {}
        """Of these a byte comes now and then, until the time that each has."""
        self.apart: set[frozenset[InstanceId]] = set()
        """Pairs that do not reach each other: mail between them waits, and pulls do."""
        self.fair_s = 0.0
        """Fair time so far."""
        self._gates: dict[bytes, PrepareGate] = {}
        self._met_s: dict[tuple[InstanceId, InstanceId], float] = {}
        """When each was told of the other."""
        self._stood: set[tuple[InstanceId, InstanceId]] = set()
        """Whose connection has stood since then."""
        self._told: set[tuple[InstanceId, InstanceId]] = set()
        """Who has said of whom that there is no connection."""
        self.watch = LivenessWatch(self)
        super().__init__(**settings)

    # What is held back

    def actions(self) -> list[Action]:
        """Nothing that a fault holds back."""
        found = super().actions()
        if not (self.bad_disks or self.stuck or self.slow or self.apart):
            return found
        return [action for action in found if not self._is_held_back(action)]

    def _is_held_back(self, action: Action) -> bool:
        match action:
            case Delivery(src, dst) if src is not None and dst is not None:
                return frozenset((src, dst)) in self.apart
            case CompletePull(taker, index):
                return self._hangs(taker, self.members[taker].mover.pulls[index])
        return False

    def _hangs(self, taker: InstanceId, pull: Pull) -> bool:
        src = pull.what.src
        if self.now_s < self.slow.get(pull, 0.0):
            return True
        if src is None:
            return taker in self.bad_disks or pull in self.stuck
        return pull in self.stuck or frozenset((src, taker)) in self.apart

    def pulls(self) -> list[tuple[InstanceId, Pull]]:
        """All that are under way, and to whom."""
        return [(i, pull) for i, one in sorted(self.members.items()) for pull in one.mover.pulls]

    def slow_down(self, pull: Pull) -> None:
        """It takes minutes from now on."""
        self.slow[pull] = self.now_s + SLOW_PULL_S

    def part(self, one: InstanceId, other: InstanceId) -> None:
        """These two do not reach each other from now on, whether they have met or not."""
        self.apart.add(frozenset((one, other)))
        for pair in ((one, other), (other, one)):
            if pair in self._met_s:
                self._met_s[pair] = self.now_s

    def meet(self, pair: frozenset[InstanceId]) -> None:
        """The two reach each other; what waited comes."""
        self.apart.discard(pair)
        for me, peer in sorted(one for one in self._met_s if frozenset(one) == pair):
            if (me, peer) in self._told - self._stood and me in self.members:
                self.post(me, None, LateContact(me, peer))
            self._told.discard((me, peer))
            self._stood.add((me, peer))

    # What instances do about it

    def connect(self, dst: InstanceId, message: Connect) -> None:
        """An instance is told of peers."""
        super().connect(dst, message)
        for peer in message.gone:
            self._met_s.pop((dst, peer), None)
            self._told.discard((dst, peer))
            self._stood.discard((dst, peer))
        for peer, _ in message.peers:
            self._met_s.setdefault((dst, peer), self.now_s)
            if frozenset((dst, peer)) not in self.apart:
                self._stood.add((dst, peer))

    def tell(self, src: Address, member: ChosenMember, message: Message, hidden: Any) -> None:
        """Orders that need a connection wait for it at the gate."""
        gate = self._gate_of(member)
        match message:
            case Prepare() | Migrate() | Rollback() | EndMigration() if not (
                gate.passes(message, self.now_s)
            ):
                return
            case Form():
                gate.clear()
        super().tell(src, member, message, hidden)

    def _gate_of(self, member: ChosenMember) -> PrepareGate:
        me = member.instance_id

        def unreached(peers: Iterable[InstanceId]) -> list[InstanceId]:
            return [
                peer
                for peer in peers
                if peer != me and (peer not in member.known or frozenset((me, peer)) in self.apart)
            ]

        return self._gates.setdefault(member.process, PrepareGate(me, unreached, lambda _: FIRST_S))

    def collect_mail(self) -> None:
        """The gates turn with everything that happens."""
        for instance_id, member in self.members.items():
            gate = self._gates.get(member.process)
            if gate is None or not gate.is_waiting:
                continue
            passed, refused = gate.turn(self.now_s)
            for order in passed:
                super().tell(None, member, order, None)
            for answer in refused:
                self.post(instance_id, None, answer)
        super().collect_mail()

    def pass_time(self, seconds: float) -> None:
        """Let time pass; who waits in vain gives up."""
        super().pass_time(seconds)
        self._give_up_pulls()
        self._say_who_is_apart()

    def _give_up_pulls(self) -> None:
        """Those of which nothing comes; of slow ones a little does."""
        for instance_id, pull in self.pulls():
            member = self.members[instance_id]
            if self.now_s < self.slow.get(pull, 0.0):
                member.mover.landed_bytes += 1
                continue
            is_silent = self.now_s - pull.asked_s > SILENT_PULL_S
            if pull.what.src is not None and is_silent and pull in member.mover.pulls:
                self.end_pull(member, pull.what, self.land(member, pull, fails=True))
        self.collect_mail()

    def _say_who_is_apart(self) -> None:
        for pair, met_s in sorted(self._met_s.items()):
            me, peer = pair
            patience_s = LINK_S if pair in self._stood else FIRST_S
            is_late = frozenset(pair) in self.apart and self.now_s - met_s > patience_s
            if is_late and pair not in self._told and me in self.members:
                self._told.add(pair)
                self.post(me, None, LinkBroken(me, peer, "no connection", is_down=True))

    def cut(self, instance_id: InstanceId, *, is_dead: bool) -> None:
        """Nothing is left of who is gone."""
        super().cut(instance_id, is_dead=is_dead)
        self._met_s = {pair: s for pair, s in self._met_s.items() if instance_id not in pair}
        self._told = {pair for pair in self._told if instance_id not in pair}
        self._stood = {pair for pair in self._stood if instance_id not in pair}

    # Fair time

    def endure(self, seconds: float, turn_s: float = TURN_S) -> None:
        """Let fair time pass, in turns. Nothing may wait for longer than it may."""
        until_s = self.fair_s + seconds
        while self.fair_s < until_s:
            began_s = self.now_s
            for _ in range(ROUNDS):
                for action in self.actions():
                    if action in self.actions():
                        self.perform(action)
            self.pass_time(turn_s)
            self.fair_s += self.now_s - began_s
            self.check()
            self.watch.look(self.fair_s)
