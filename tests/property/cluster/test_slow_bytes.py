"""Restores and drops whose bytes come, come slowly, come no more or are refused, in any order.

Nothing is called off while bytes come, nothing is waited for that has stopped, and once a restore
is called off its memory is KV memory again without any further byte.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kunserve.control.cluster.transition import Phase, Transition
from kunserve.control.cluster.transitions import PATIENCE_S
from kunserve.control.instance.arrivals import TELL_S
from kunserve.control.instance.changes.layer_restore import LayerRestore
from kunserve.core.ids import TransitionId
from kunserve_lab.world.actions import Action, CompletePull
from tests.examples import examples
from tests.fake_cluster import FakeCluster

STAGES = ((0, 0, 2), (1, 2, 4))
TURN_S = 6.0
SLACK_S = 70.0
"""Steps of the patience, as long as a turn, and what is told a while after it was so."""


class SlowBytes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = FakeCluster(pools=(24, 24))
        self.came_s: dict[TransitionId, float] = {}
        """When each transition began a phase, or bytes came for it last."""
        self.phases: dict[TransitionId, Phase] = {}

    def is_pull(self, action: Action) -> bool:
        """Of a change of groups. What is loaded to stand at all comes at once."""
        if not isinstance(action, CompletePull):
            return False
        return self.cluster.members[action.instance_id].agent.change.change_id is not None

    @property
    def active(self) -> list[Transition]:
        return list(self.cluster.controller.transitions.active.values())

    @property
    def num_pulls(self) -> int:
        return sum(len(member.mover.pulls) for member in self.cluster.members.values())

    def settle(self) -> None:
        """All but bytes goes its way."""
        self.cluster.run_except(self.is_pull)
        for transition in self.active:
            if self.phases.get(transition.transition_id) != transition.phase:
                self.came_s[transition.transition_id] = self.cluster.now_s
            self.phases[transition.transition_id] = transition.phase

    @rule(num_prompt=st.integers(1, 9), max_tokens=st.integers(1, 12))
    def submit(self, num_prompt: int, max_tokens: int) -> None:
        self.cluster.request(num_prompt, max_tokens)
        stop = self.cluster.num_actions + 5
        self.cluster.run_except(self.is_pull, lambda: self.cluster.num_actions >= stop)

    @precondition(lambda self: not self.active)
    @rule()
    def change_groups(self) -> None:
        groups = self.cluster.groups()
        if len(groups) == 2:
            self.cluster.drop(*STAGES)
        elif len(groups) == 1:
            self.cluster.restore(groups[0])
        self.settle()

    @precondition(lambda self: self.num_pulls)
    @rule(data=st.data(), fails=st.booleans())
    def one_lands(self, data: st.DataObject, fails: bool) -> None:
        pulls = [action for action in self.cluster.actions() if self.is_pull(action)]
        action = data.draw(st.sampled_from(pulls))
        assert isinstance(action, CompletePull)
        self.cluster.perform(CompletePull(action.instance_id, action.index, fails=fails))
        self.settle()

    @precondition(lambda self: self.num_pulls)
    @rule(seconds=st.just(300.0))
    def bytes_trickle(self, seconds: float) -> None:
        """No pull ends, and nobody loses patience."""
        before = {transition.transition_id for transition in self.active}
        for _ in range(int(seconds / TURN_S)):
            for member in self.cluster.members.values():
                if member.mover.pulls:
                    member.mover.landed_bytes += 1
            self.cluster.pass_time(TURN_S)
            self.settle()
        assert {transition.transition_id for transition in self.active} == before
        for transition_id in before:
            self.came_s[transition_id] = self.cluster.now_s - TELL_S

    @rule(seconds=st.sampled_from([30.0, 120.0, 240.0]))
    def nothing_comes(self, seconds: float) -> None:
        for _ in range(int(seconds / TURN_S)):
            self.cluster.pass_time(TURN_S)
            self.settle()

    @precondition(lambda self: any(t.may_roll_back for t in self.active))
    @rule()
    def call_off(self) -> None:
        """Not a byte comes any more, and after the step that runs all memory is as before."""
        (transition,) = self.active
        self.cluster.roll_back(transition.transition_id)
        self.settle()
        for member in self.cluster.members.values():
            assert not member.mover.pulls and not member.agent.is_in_transition

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        for transition in self.active:
            waited_s = self.cluster.now_s - self.came_s[transition.transition_id]
            assert waited_s <= PATIENCE_S[transition.phase] + SLACK_S, (transition, waited_s)

    @invariant()
    def memory_is_narrowed_only_in_a_restore(self) -> None:
        loading = {t.transition_id for t in self.active}
        for member in self.cluster.members.values():
            change = member.agent.change
            if isinstance(change, LayerRestore):
                assert change.change_id in loading, change.phase

    def teardown(self) -> None:
        self.cluster.finish()


TestSlowBytes = SlowBytes.TestCase
TestSlowBytes.settings = settings(max_examples=examples(10), stateful_step_count=12, deadline=None)
