"""Every fault, on every member, at every moment of a drop and of a restore before its commit.

Whatever happens the transition rolls back wholly (or goes on, where the fault is none of its
business), nothing is leaked, every request gets its own tokens, and the same transition succeeds
afterwards. Faults after the commit, and deaths and aborts at every single action, are in
``test_agent_races``; random mixtures of all in ``tests/property/cluster/test_transitions``.
A remap that fails after the commit ends the instance's process; that layers
arrive whole is TCP's business, so a pull may end short but not with other bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import pytest

from kunserve.control.cluster.transition import Phase
from kunserve.control.cluster.transitions import PATIENCE_S
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.changes import transition
from kunserve.control.instance.changes.layer_restore import LayerRestore
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.messages import LayersLoaded, Prepared
from kunserve.transport.wire.codec import decode, encode
from kunserve_lab.world.actions import Action, CompletePull, Letter, StartStep
from tests.fake_cluster import FakeCluster, link

NUM_LAYERS = 6
MEMBERS = (0, 1, 2)
STAGES = ((0, 0, 2), (1, 2, 4), (2, 4, 6))
FIRST = TransitionId(0)

Kind: TypeAlias = Literal["drop", "restore"]
DROP_MOMENTS = ("asked", "one is ready", "all are ready, unheard")
RESTORE_MOMENTS = (
    "told",
    "leader has narrowed",
    "one has mapped",
    "one pull has landed",
    "one is filled",
    "all are filled, unheard",
    *DROP_MOMENTS,
)
MOMENTS: list[tuple[Kind, str]] = [
    *(("drop", moment) for moment in DROP_MOMENTS),
    *(("restore", moment) for moment in RESTORE_MOMENTS),
]
at_every_moment = pytest.mark.parametrize(("kind", "moment"), MOMENTS)
MIDDLE = pytest.param(1, marks=pytest.mark.slow)
"""Neither the leader nor the last: a commit does what these two do, at every moment."""
on_every_member = pytest.mark.parametrize("member", [0, MIDDLE, 2])


def never(action: Action) -> bool:
    return False


def is_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def is_to_controller(action: Action) -> bool:
    return any(link(member, None)(action) for member in MEMBERS)


SEEN: set[tuple[Kind, str]] = set()
"""Of which every step has been checked."""


@dataclass
class Scene:
    """A cluster with requests under way and a transition that has come to a given moment."""

    cluster: FakeCluster
    kind: Kind
    before: list[GroupLayout]
    transition_id: TransitionId = FIRST

    @classmethod
    def set_up(cls, kind: Kind, moment: str) -> "Scene":
        """What comes before the moment is the same each time, and is checked the first time."""
        cluster = FakeCluster(NUM_LAYERS, pools=(14, 14, 14), block_size=1, layer_units=60)
        cluster.is_checked = (kind, moment) not in SEEN
        if kind == "restore":
            cluster.drop(*STAGES)
            cluster.run_until_idle()
        for _ in range(6):
            cluster.request(2, 6)
        begin = cluster.num_actions
        cluster.run_except(never, lambda: cluster.num_actions >= begin + 24)
        assert len(cluster.unfinished) == 6
        scene = cls(cluster, kind, cluster.groups())
        scene.begin()
        scene.reach(moment)
        assert scene.phase in ("loading", "preparing"), "it has committed already"
        SEEN.add((kind, moment))
        cluster.is_checked = True
        return scene

    def begin(self) -> None:
        if self.kind == "drop":
            self.transition_id = self.cluster.drop(*STAGES)
        else:
            (group,) = (g for g in self.cluster.groups() if len(g.stages) > 1)
            self.transition_id = self.cluster.restore(group)

    @property
    def phase(self) -> Phase:
        return self.cluster.controller.transitions.active[self.transition_id].phase

    def awaits(self, member: int) -> bool:
        """Whether the controller has yet to hear from the member."""
        active = self.cluster.controller.transitions.active
        return InstanceId(member) in active[self.transition_id].waits_for

    def load_phases(self) -> list[str]:
        return [load_phase(m.agent) for m in self.cluster.members.values()]

    def is_ready(self, member: int) -> bool:
        return isinstance(self.cluster.agent(member).change, transition.TransitionMember)

    def reach(self, moment: str) -> None:
        cluster = self.cluster
        if self.kind == "restore" and moment in DROP_MOMENTS:
            cluster.run_until(lambda: self.phase == "preparing")
        match moment:
            case "told" | "asked":
                return
            case "leader has narrowed":
                cluster.run_except(is_pull, lambda: self.load_phases()[0] != "idle")
            case "one has mapped":
                cluster.run_except(is_pull, lambda: "filling" in self.load_phases())
            case "one pull has landed":
                cluster.run_except(is_pull)
                assert self.load_phases() == ["filling"] * 3
                cluster.perform(next(a for a in cluster.actions() if is_pull(a)))
            case "one is filled":
                cluster.run_except(never, lambda: "filled" in self.load_phases())
            case "all are filled, unheard":
                cluster.run_except(is_to_controller)
                assert self.load_phases() == ["filled"] * 3
            case "one is ready":
                cluster.run_except(never, lambda: any(map(self.is_ready, MEMBERS)))
            case "all are ready, unheard":
                cluster.run_except(is_to_controller)
                assert all(map(self.is_ready, MEMBERS))
            case _:
                raise AssertionError(moment)

    @property
    def outcome(self) -> str:
        records = self.cluster.controller.transitions.latest()
        return next(r.ending for r in records if r.transition_id == self.transition_id)

    def prove_rolled_back(self) -> None:
        """Everything is as before, for everybody, and the same can be done again."""
        cluster = self.cluster
        cluster.run_until(lambda: not any(m.agent.is_in_transition for m in members(cluster)))
        cluster.run_except(lambda action: isinstance(action, StartStep))
        assert self.outcome.startswith("rolled back"), self.outcome
        assert cluster.groups() == self.before
        for layout in self.before:
            for member, layers in layout.stages:
                one = cluster.members[member]
                assert one.agent.membership.layout == layout
                assert one.body.held == one.agent.state.held == one.mover.offered == layers
                assert one.agent.state.table.num_units == one.body.kv_units
                assert not one.mover.pulls and not one.mover.exports
                assert one.body.prepared is None
            leader = cluster.agent(layout.leader)
            assert (
                leader.membership.scheduler is not None and leader.membership.scheduler.may_preempt
            )
            capacity = leader.membership.scheduler.load(0, 0, 0.0).capacity_blocks
            assert capacity == leader.membership.capacity_blocks
        self.prove_it_can_be_done()

    def prove_it_can_be_done(self) -> None:
        if len(self.cluster.groups()) == (3 if self.kind == "drop" else 1):
            self.begin()
        self.cluster.finish()
        assert self.outcome == "done", self.outcome
        whole = LayerRange(0, NUM_LAYERS)
        for number in MEMBERS:
            one = self.cluster.members[InstanceId(number)]
            wanted = LayerRange(*STAGES[number][1:]) if self.kind == "drop" else whole
            assert one.body.held == one.mover.offered == wanted


def load_phase(agent: InstanceAgent) -> str:
    """How far the instance is with loading its layers."""
    change = agent.change
    if isinstance(change, transition.TransitionMember):
        change = change.before
    return change.phase if isinstance(change, LayerRestore) else "idle"


def members(cluster: FakeCluster):  # type: ignore[no-untyped-def]
    return list(cluster.members.values())


# The transition is off


@at_every_moment
def test_the_controller_changes_its_mind(kind: Kind, moment: str) -> None:
    scene = Scene.set_up(kind, moment)
    assert scene.cluster.roll_back(scene.transition_id)
    scene.prove_rolled_back()


@on_every_member
@at_every_moment
def test_a_member_says_no(kind: Kind, moment: str, member: int) -> None:
    """Even one that has prepared, or loaded, all the same."""
    scene = Scene.set_up(kind, moment)
    assert scene.awaits(member)
    say_no(scene.cluster, InstanceId(member))
    scene.cluster.run_until(lambda: scene.outcome != "running")
    assert f"instance {member}: no memory" in scene.outcome
    scene.prove_rolled_back()


def say_no(cluster: FakeCluster, member: InstanceId) -> None:
    """The next answer of the member, on its way or yet to be sent, becomes a refusal."""
    post = cluster.post

    def forge(src, dst, message, hidden=None):  # type: ignore[no-untyped-def]
        if src == member and isinstance(message, Prepared | LayersLoaded):
            message = replace(message, refusal="no memory")
            cluster.post = post  # type: ignore[method-assign]
        post(src, dst, message, hidden)

    letters = cluster.links.get((member, None), ())
    for index, letter in enumerate(letters):
        message = decode(letter.data)
        if isinstance(message, Prepared | LayersLoaded):
            letters[index] = Letter(bytes(encode(replace(message, refusal="no memory"))), None)
            return
    cluster.post = forge  # type: ignore[method-assign]


@on_every_member
@pytest.mark.parametrize("kind", ["drop", "restore"])
def test_a_member_cannot(kind: Kind, member: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses by itself, and so has nothing to roll back while the others have."""
    scene = Scene.set_up(kind, "asked")
    find_obstacle = transition.find_obstacle

    def obstacle(me: tuple[InstanceId], *args: object) -> str | None:
        return "no memory" if me == (member,) else find_obstacle(me, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(transition, "find_obstacle", obstacle)
        scene.cluster.run_until(lambda: scene.outcome != "running")
    assert f"instance {member}: no memory" in scene.outcome
    scene.prove_rolled_back()


@on_every_member
@pytest.mark.parametrize("kind", ["drop", "restore"])
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_memory_that_cannot_be_mapped(kind: Kind, member: int, num_pieces: int) -> None:
    """The body refuses before the commit, at once or at its last piece: nothing has changed."""
    scene = Scene.set_up(kind, "asked" if kind == "drop" else "told")
    body = scene.cluster.members[InstanceId(member)].body
    body.refusal, body.num_pieces = "no memory", num_pieces
    scene.cluster.run_until(lambda: scene.outcome != "running")
    assert f"instance {member}: no memory" in scene.outcome
    body.refusal = None
    scene.prove_rolled_back()


@on_every_member
@at_every_moment
def test_a_member_does_not_answer(kind: Kind, moment: str, member: int) -> None:
    scene = Scene.set_up(kind, moment)
    assert scene.awaits(member)
    phase = scene.phase
    scene.cluster.run_except(link(member, None))
    assert scene.phase == phase, "it went on without the member"
    assert phase in ("loading", "preparing")
    scene.cluster.pass_time(PATIENCE_S[phase] + 1.0)
    assert f"no answer from instances [{member}]" in scene.outcome
    scene.prove_rolled_back()


@on_every_member
@at_every_moment
def test_a_member_hears_nothing(kind: Kind, moment: str, member: int) -> None:
    """Its mail comes when all is over: the question and its withdrawal together."""
    scene = Scene.set_up(kind, moment)
    deaf = [link(other, member) for other in (None, *MEMBERS) if other != member]
    scene.cluster.run_except(lambda action: any(blocks(action) for blocks in deaf))
    if scene.outcome != "running" or scene.phase not in (Phase.LOADING, Phase.PREPARING):
        scene.prove_it_can_be_done()  # it had heard enough
        return
    scene.cluster.pass_time(PATIENCE_S[Phase.LOADING] + 1.0)
    scene.prove_rolled_back()


@on_every_member
@pytest.mark.parametrize("kind", ["drop", "restore"])
def test_a_member_hears_nothing_of_the_commit(kind: Kind, member: int) -> None:
    """The others wait for it in vain, and start anew; it finds its way when its mail comes."""
    scene = Scene.set_up(kind, "all are ready, unheard")
    deaf = [link(other, member) for other in (None, *MEMBERS) if other != member]
    scene.cluster.run_except(lambda action: any(blocks(action) for blocks in deaf))
    assert scene.phase is Phase.COMMITTING
    scene.cluster.pass_time(PATIENCE_S[Phase.COMMITTING] + 100.0)
    assert scene.outcome.startswith("failed: no answer from instances"), scene.outcome
    scene.cluster.finish()
    assert [len(layout.stages) for layout in scene.cluster.groups()] == [1, 1, 1]


# A member is lost


@on_every_member
@at_every_moment
def test_a_member_is_lost(kind: Kind, moment: str, member: int) -> None:
    """A drop leaves the other groups as they were; of a pipeline the survivors form anew."""
    scene = Scene.set_up(kind, moment)
    cluster, victim = scene.cluster, InstanceId(member)
    others = [layout for layout in scene.before if victim not in layout.members]
    cluster.kill_instance(victim)
    cluster.check()
    assert scene.outcome.startswith("rolled back"), scene.outcome
    cluster.run_until(lambda: not any(m.agent.is_in_transition for m in members(cluster)))
    assert [layout for layout in cluster.groups() if layout in others] == others
    cluster.start_instance(victim)
    cluster.run_until(lambda: len(cluster.groups()) == 3)
    if kind == "drop":
        scene.prove_it_can_be_done()
    cluster.finish()


@on_every_member
@pytest.mark.parametrize("kind", ["drop", "restore"])
def test_a_member_is_lost_with_the_commit_on_its_way(kind: Kind, member: int) -> None:
    """The last moment: others may stand in the new group already, so they form anew."""
    scene = Scene.set_up(kind, "all are ready, unheard")
    cluster = scene.cluster
    cluster.run_except(
        lambda action: any(link(None, one)(action) for one in MEMBERS),
        lambda: scene.phase == "committing",
    )
    cluster.kill_instance(InstanceId(member))
    assert scene.outcome.startswith("failed"), scene.outcome
    cluster.start_instance(InstanceId(member))
    cluster.finish()
    assert len(cluster.groups()) == 3


@on_every_member
@pytest.mark.parametrize("kind", ["drop", "restore"])
def test_memory_cannot_be_remapped(
    kind: Kind, member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena is undefined then, so the process dies of it, before or after the commit."""
    scene = Scene.set_up(kind, "asked" if kind == "drop" else "told")
    cluster, victim = scene.cluster, InstanceId(member)
    method = "drop" if kind == "drop" else "reclaim"

    def fail(layers: LayerRange) -> None:
        raise OSError("mmap failed")

    monkeypatch.setattr(cluster.members[victim].body, method, fail)
    with pytest.raises(OSError, match="mmap failed"):
        cluster.run_until_idle()
    cluster.kill_instance(victim)
    assert scene.outcome.startswith("failed" if kind == "drop" else "rolled back"), scene.outcome
    cluster.start_instance(victim)
    cluster.finish()
    assert len(cluster.groups()) == 3
    scene.kind = "drop"
    scene.prove_it_can_be_done()


# Layers do not come as they should


@on_every_member
@pytest.mark.parametrize("num_landed", [0, 1])
@pytest.mark.parametrize("how", ["refused", "short"])
def test_layers_are_not_given(how: str, num_landed: int, member: int) -> None:
    """Refused, or cut off half-way with rubbish in place: then they come from disk."""
    scene = Scene.set_up("restore", "one has mapped")
    cluster, taker = scene.cluster, InstanceId(member)
    cluster.run_except(is_pull)
    mover, body = cluster.members[taker].mover, cluster.members[taker].body
    assert len(mover.pulls) > num_landed
    for _ in range(num_landed):
        cluster.perform(CompletePull(taker, 0))
    while mover.pulls:
        if how == "short":
            layers = mover.pulls[0].what.layers
            body.layer_view(layers.first)[:7] = 0x5A
        cluster.perform(CompletePull(taker, 0, fails=True))
    cluster.finish()
    assert scene.outcome == "done"


@pytest.mark.parametrize("num_landed", [0, 1])
def test_a_load_that_hangs_does_not_keep_memory_from_the_restore_that_is_called_off(
    num_landed: int,
) -> None:
    """No byte comes any more: all the same the weights become KV memory after the running step."""
    scene = Scene.set_up("restore", "one has mapped")
    cluster = scene.cluster
    cluster.run_except(is_pull)
    for member in members(cluster):
        for _ in range(num_landed):
            cluster.perform(CompletePull(member.instance_id, 0))
        assert member.mover.pulls
    assert cluster.roll_back(scene.transition_id)
    cluster.run_except(is_pull, lambda: not any(m.agent.is_in_transition for m in members(cluster)))
    for member in members(cluster):
        assert not member.mover.pulls and not member.agent.is_in_transition
    scene.prove_rolled_back()


# Requests come and go


def arrive(scene: Scene, member: int) -> None:
    for _ in range(3):
        scene.cluster.request(3, 4)


def abort(scene: Scene, member: int) -> None:
    table = scene.cluster.agent(member).state.table
    for request_id in table.request_ids()[:2]:
        if request_id in scene.cluster.unfinished:
            scene.cluster.cancel(request_id)


def end(scene: Scene, member: int) -> None:
    """Requests end while the transition's messages to the member are late."""
    cluster = scene.cluster
    count = len(cluster.unfinished)
    blocked = link(None, member)
    cluster.run_except(
        lambda action: blocked(action) or is_pull(action), lambda: len(cluster.unfinished) < count
    )


@pytest.mark.parametrize(
    ("happens", "member"),
    [
        (arrive, 0),
        (abort, 0),
        (abort, 2),
        (end, 0),
        pytest.param(end, 1, marks=pytest.mark.slow),
        (end, 2),
    ],
)
@pytest.mark.parametrize("is_off", [False, True], ids=["", "and it is rolled back"])
@at_every_moment
def test_requests_come_and_go(
    kind: Kind, moment: str, is_off: bool, happens: Callable[[Scene, int], None], member: int
) -> None:
    scene = Scene.set_up(kind, moment)
    happens(scene, member)
    if is_off and scene.cluster.roll_back(scene.transition_id):
        scene.prove_rolled_back()
        return
    scene.cluster.run_until(lambda: scene.outcome != "running")
    if scene.outcome.startswith("rolled back"):
        assert "blocks are in use" in scene.outcome  # requests have grown meanwhile
    scene.prove_it_can_be_done()
