"""Clusters of fake instances for tests: building them, forcing transitions, proving tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kunserve.control.cluster.commands import Send
from kunserve.control.cluster.standing import Standing
from kunserve.control.instance.agent import InstanceAgent
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.kv_blocks import KvBlocks, ring_of
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import AllowParking, LoadLayers
from kunserve.core.plan import Measured, Plan, SwapPlan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import HeadShape
from kunserve.policy.drop.restore import choose_sources, parting_capacity_blocks, parts_of
from kunserve_lab.world.actions import (
    Action,
    CompletePull,
    Delivery,
    FinishStep,
    MapMore,
    RunAhead,
    StartStep,
)
from kunserve_lab.world.by_choice import ChosenWorld
from kunserve_lab.world.fake_body import FakeModel, expected_scores, expected_tokens, fake_spec

COST = CostCoefficients(attention_s=0.0, token_s=1e-3, chunk_s=1e-3, shared_s=1e-3)
"""What schedulers believe of steps."""
FREE_ROWS = CostCoefficients(attention_s=0.0, token_s=1e-9, chunk_s=1e-3, shared_s=1e-3)


class FakeCluster(ChosenWorld):
    """An in-process cluster whose transitions the test forces, and that knows every answer."""

    is_checked = True
    """Whether owners are asked after each action."""

    def __init__(
        self,
        num_layers: int = 4,
        pools: Sequence[int] = (12, 12),
        block_size: int = 2,
        layer_units: int = 24,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int | None = None,
        extra_units: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        swap: SwapPlan | None = None,
        head_cost_layers: float | None = None,
        caches: bool = True,
        speculative: SpeculativeConfig | None = None,
        vocab_size: int = 1000,
        windows: tuple[int, int] | None = None,
        overload: OverloadConfig | None = None,
        size: ClusterConfig | None = None,
        ranks: Sequence[int] = (),
        num_late_steps: int = 0,
    ) -> None:
        """``pools``: each instance's KV blocks with all layers; a layer frees ``layer_units``.

        ``caches``: whether KV of equal beginnings is computed once.

        With ``speculative`` guesses are taken to cost nothing; a small ``vocab_size`` makes some
        right.

        ``windows``: (tokens that layers see, period), all but the last of every period, whose KV is
        a ring.

        ``overload``: when the monitor changes groups; else it never does. ``ranks`` of each
        instance; one by default. ``num_late_steps``: see ``FakeBody``.

        With ``head_cost_layers`` the stages of a pipeline compute the output head together.
        """
        window, period = windows or (None, 1)
        self.model = FakeModel(num_layers, vocab_size, eos_token_ids, window, period)
        ring = None
        if window is not None:
            ring = ring_of(window, period, block_size, max_num_batched_tokens)
        head = None
        if head_cost_layers is not None:
            head = HeadShape(self.model.vocab_size, head_cost_layers)
        specs = [
            fake_spec(
                InstanceId(i),
                num_layers,
                blocks * num_layers + extra_units,
                block_size,
                layer_bytes=layer_units * block_size * 8,
                granule_bytes=block_size * 8,
                head=head,
                kv_ring=ring,
            )
            for i, blocks in enumerate(pools)
        ]
        for i, num in enumerate(ranks):
            specs[i] = replace(specs[i], tensor_parallel_size=num)
        self.max_model_len = max_model_len or KvBlocks(block_size, ring).tokens_in(min(pools))
        config = KunServeConfig(
            instance=InstanceConfig(
                block_size=block_size,
                disable_hybrid_kv_cache_manager=ring is None,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens,
                enable_prefix_caching=caches,
                speculative_config=speculative,
            ),
            cluster=size or ClusterConfig(),
            overload=overload or OverloadConfig("recompute" if swap is None else "swap"),
        )
        measured = Measured(COST if speculative is None else FREE_ROWS, swap, ring)
        self._num_requests = 0
        self.num_actions = 0
        self.num_late_steps = num_late_steps
        super().__init__(self.model, specs, Plan(config, measured), self.max_model_len)
        self.run_until_idle()

    # Requests

    def request(
        self,
        num_prompt: int = 5,
        max_tokens: int = 8,
        sampling: SamplingParams | None = None,
        num_common: int = 0,
        salt: str = "",
    ) -> RequestId:
        """Submit a request with a prompt of its own, but for its ``num_common`` first tokens."""
        number = self._num_requests
        self._num_requests += 1
        draw = random.Random(number)
        prompt = tuple(draw.randrange(1000) for _ in range(num_prompt))
        common = random.Random("common")
        prompt = (*(common.randrange(1000) for _ in range(num_common)), *prompt)[:num_prompt]
        request_id = RequestId(f"r{number}")
        sampling = sampling or SamplingParams(max_tokens, temperature=0.0)
        self.submit(Request(request_id, prompt, sampling, float(number), cache_salt=salt))
        return request_id

    def prove_tokens(self) -> None:
        """Every request has ended once, with the tokens of an undisturbed run."""
        for request_id, account in self.accounts.items():
            true = expected_tokens(account.request, self.model, self.max_model_len)
            got = tuple(account.token_ids)
            if account.is_cancelled:
                assert got == true[: len(got)], (request_id, got, true)
            else:
                assert account.end is not None, request_id
                assert got == true, (request_id, got, true)
            if got:
                scores = expected_scores(account.request, self.model)
                pieces = account.prompt_scores
                assert tuple(row for one in pieces for row in one.rows()) == scores, request_id

    def check_empty(self) -> None:
        """When idle: nobody waits for layers either, as far as the controller knows."""
        super().check_empty()
        given = self.controller._peer_discovery.given
        assert not given, given

    def finish(self) -> None:
        """Run to the end of every request and prove everything."""
        self.run_until_idle()
        self.check_empty()
        self.prove_tokens()

    # Interleavings

    def run_except(
        self, blocked: Callable[[Action], bool], stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Let everything happen but what is blocked, until nothing else can or ``stop``."""
        while not stop():
            allowed = [action for action in self.actions() if not blocked(action)]
            if not allowed:
                return
            action = allowed[self.num_actions % len(allowed)]
            self.perform(action)
            self.check_after(action)

    def run_until(self, stop: Callable[[], bool]) -> None:
        """Let everything happen, time too, until ``stop``."""
        for _ in range(20):
            self.run_except(lambda action: False, stop)
            if stop():
                return
            self.pass_time(0.6)
        raise AssertionError("it never stops")

    def perform(self, action: Action) -> None:
        """Let it happen, and count."""
        self.num_actions += 1
        super().perform(action)

    def check_after(self, action: Action) -> None:
        """Every invariant that it may have broken. Only a pull touches two instances."""
        if not self.is_checked:
            return
        if isinstance(action, CompletePull):
            self.check()
            return
        self.controller.check()
        place = place_of(action)
        if place in self.members:
            self.members[place].check()

    def agent(self, instance_id: int) -> InstanceAgent:
        """An instance's brain."""
        return self.members[InstanceId(instance_id)].agent

    # Groups

    def groups(self) -> list[GroupLayout]:
        """The groups that stand, except those in transition."""
        groups = self.controller.placement.groups.values()
        return [group.layout for group in groups if Standing.CHANGING not in group.standing]

    def layout(self, *stages: tuple[int, int, int]) -> GroupLayout:
        """A new group from (instance, first layer, end layer) of each stage."""
        return GroupLayout(
            self.controller.placement.new_ids(1),
            tuple(Stage(InstanceId(i), LayerRange(first, end)) for i, first, end in stages),
        )

    def drop(self, *stages: tuple[int, int, int]) -> TransitionId:
        """Merge the present groups of these instances into the group given."""
        new = self.layout(*stages)
        old = tuple(g for g in self.groups() if set(g.members) & set(new.members))
        return self.drop_to(old, new)

    def drop_to(self, old: tuple[GroupLayout, ...], new: GroupLayout) -> TransitionId:
        """Merge groups into one."""
        transition_id = self.controller.transitions.begin_drops([(old, new)], "test", self.now_s)[0]
        self.carry_out()
        return transition_id

    def restore(self, old: GroupLayout, capacity_blocks: int | None = None) -> TransitionId:
        """Part a group, whatever its load; by default with as much KV as surely fits."""
        placement = self.controller.placement
        new = parts_of(old, placement.new_ids(len(old.stages)))
        own = {stage.instance_id: stage.layers for stage in old.stages}
        sources = choose_sources(old, own, placement.specs)
        if capacity_blocks is None:
            capacity_blocks = parting_capacity_blocks(old, new, placement.specs, 0)

        def load(transition_id: TransitionId) -> LoadLayers:
            return LoadLayers(transition_id, old.group_id, capacity_blocks, sources)

        transition_id = self.controller.transitions.begin_restore(
            old, new, load, "test", self.now_s
        )
        self.carry_out()
        return transition_id

    def migrate(self, source: GroupId, target: GroupId, max_blocks: int = 1000) -> TransitionId:
        """Move a running request of one group to another, however free they are."""
        migration_id = self.controller.balance.begin(source, target, max_blocks)
        self.carry_out()
        return migration_id

    def allow_parking(self, group: GroupLayout) -> None:
        """Tell a group's leader that nothing is left to drop, as if it were so."""
        self.controller._outbox.append(Send(group.leader, AllowParking(group.group_id)))
        self.carry_out()

    def reset_prefix_cache(self) -> None:
        """Have every group forget what no request shares."""
        self.controller.reset_prefix_cache()
        self.carry_out()

    def roll_back(self, transition_id: TransitionId) -> bool:
        """The controller changes its mind; False if it is too late."""
        transition = self.controller.transitions.active.get(transition_id)
        if transition is None or not transition.may_roll_back:
            return False
        self.controller.transitions.roll_back(transition, "test", self.now_s)
        self.carry_out()
        return True


def place_of(action: Action) -> InstanceId | None:
    """Where it happens; None is the controller."""
    match action:
        case Delivery(dst=dst):
            return dst
        case (
            StartStep(instance_id)
            | RunAhead(instance_id)
            | FinishStep(instance_id)
            | MapMore(instance_id)
            | CompletePull(instance_id)
        ):
            return instance_id


def link(src: int | None, dst: int | None) -> Callable[[Action], bool]:
    """Blocks the deliveries on one link; None is the controller."""
    return lambda action: action == Delivery(_address(src), _address(dst))


def _address(number: int | None) -> InstanceId | None:
    return None if number is None else InstanceId(number)
