"""From load to transitions: when to drop, when to restore, when to ask for more instances."""

import math
from collections.abc import Iterable, Set
from dataclasses import replace

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.observed import Observation
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.reasons import Reasons
from kunserve.control.cluster.requests.prompt_share import PromptShare
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.scaling import Scaling
from kunserve.control.cluster.standing import Act
from kunserve.control.cluster.transitions import Transitions
from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.load import GroupLoad
from kunserve.core.messages import AllowParking, LoadLayers
from kunserve.core.place import ONE_HOST
from kunserve.core.snapshots import Kind
from kunserve.policy.dispatch.choice import share_out
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.decide import HEAD_COST_LAYERS, DropView, plan_forced, plan_of
from kunserve.policy.drop.monitor import (
    ClusterLoadView,
    Excuse,
    MonitorState,
    Overloaded,
    Relaxed,
    Verdict,
    observe,
)
from kunserve.policy.drop.nearness import SAME_HOST, site_of
from kunserve.policy.drop.plan import DropPlan, blocks_for_bytes
from kunserve.policy.drop.restore import Postponed, plan_restore
from kunserve.policy.drop.static_pipelines import plan_pipelines

LOOK_GAP_S = 5e-3
"""Shortest time between two looks at the load, per group: a look costs time for each of them."""
MAX_LOOK_GAP_S = 0.05
"""Of many groups: half a report period."""


class OverloadControl:
    """Asks the monitor, and turns its verdicts into transitions."""

    def __init__(
        self,
        config: OverloadConfig,
        pipeline_stages: int,
        block_size: int,
        placement: Placement,
        transitions: Transitions,
        requests: Requests,
        scaling: Scaling,
        prompts: PromptShare,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._pipeline_stages = pipeline_stages
        self._block_size = block_size
        self._placement = placement
        self._transitions = transitions
        self._requests = requests
        self._scaling = scaling
        self._prompts = prompts
        self._outbox = outbox
        self._monitor = MonitorState()
        self._parking_allowed_s: dict[GroupId, float] = {}
        """When each group was last told so."""
        self._next_look_s = 0.0
        self.is_paused = False
        """Whether drops and restores are made by hand only. The monitor watches all the same."""
        self.reasons = Reasons(outbox)
        self.observation: Observation | None = None
        if config.policy == "observe":
            self.observation = Observation(config, outbox)

    @property
    def reason_texts(self) -> tuple[str, ...]:
        """Why nothing is done, for people."""
        pause = ("drops and restores are paused: they are made by hand only",)
        observed = () if self.observation is None else self.observation.texts
        return (pause if self.is_paused else ()) + observed + self.reasons.texts

    def watch(self, now_s: float) -> None:
        """Called at every arrival, report and tick."""
        if self._pipeline_stages > 1:
            self._form_pipelines(now_s)
        is_on = self._config.policy in ("drop", "observe") or self._scaling.is_on
        if not is_on or now_s < self._next_look_s:
            return
        num_groups = len(self._placement.groups)
        self._next_look_s = now_s + min(MAX_LOOK_GAP_S, LOOK_GAP_S * num_groups)
        self._prompts.look(now_s)
        view = ClusterLoadView(
            tuple(self._group_loads()), self._block_size, self._last_transition_s()
        )
        self._monitor, verdict = observe(self._monitor, view, now_s, self._config)
        self._call_off(verdict.squeezed, now_s)
        if verdict.overloaded is None:
            self._scaling.shrink(view, now_s)
        else:
            self._scaling.keep_all()
            self._relieve(verdict.overloaded, view, now_s)
        excuses = list(verdict.excuses)
        if self.observation is not None:
            drop_view = self._drop_view(self._dwelling(now_s), now_s, view.groups)
            excuses = self.observation.look(view, drop_view, now_s)
        elif self.is_paused:
            excuses += _paused(verdict)
        elif verdict.relaxed is not None and now_s >= self._transitions.backoff_until_s:
            excuses += self._restore_all(verdict.relaxed, now_s)
        self.reasons.replace(excuses, now_s)

    def _form_pipelines(self, now_s: float) -> None:
        """Merge instances that stand alone, at the start and after a death."""
        refusing = self._transitions.refusing(Kind.DROP, now_s)
        alone = [
            group.layout
            for group in self._placement.that_may(Act.CHANGE)
            if len(group.layout.stages) == 1 and group.layout.group_id not in refusing
        ]
        if len(alone) < self._pipeline_stages or now_s < self._transitions.backoff_until_s:
            return
        pipelines = plan_pipelines(
            alone,
            self._placement.specs,
            self._pipeline_stages,
            first_id=self._placement.next_id,
            head_cost_layers=HEAD_COST_LAYERS,
            apart=self._transitions.cuts.pairs(now_s),
        )
        self._placement.new_ids(len(pipelines))
        merges = [(pipeline.old, pipeline.new) for pipeline in pipelines]
        self._transitions.begin_drops(merges, "pipelines from the start", now_s)

    def _group_loads(self) -> list[GroupLoad]:
        restoring = self._transitions.restoring_groups
        groups = [g for g in self._placement.groups.values() if g.is_reported]
        backlog = self._requests.backlog
        capacities = [group.capacity_blocks for group in groups]
        block_shares = share_out(backlog.num_blocks, capacities)
        num_shares = share_out(len(backlog), capacities)
        return [
            group.load.in_cluster(
                num_blocks,
                num_requests,
                self._transitions.last_end_s(group.layout),
                Act.LEND not in group.may,
                group.layout.group_id in restoring,
            )
            for group, num_blocks, num_requests in zip(
                groups, block_shares, num_shares, strict=True
            )
        ]

    @property
    def _specs(self) -> Specs:
        """Of all instances, where they stand included unless nobody shall look at it."""
        specs = self._placement.specs
        if self._config.place_aware:
            return specs
        return {i: replace(spec, place=ONE_HOST) for i, spec in specs.items()}

    def _holders(self, layout: GroupLayout) -> dict[InstanceId, LayerRange]:
        """What instances hold whose groups do not change now; none where the group's own members
        stand on one host, because nobody is nearer.
        """
        if site_of(layout.members, self._specs, SAME_HOST) is not None:
            return {}
        return {
            stage.instance_id: stage.layers
            for group in self._placement.that_may(Act.LEND)
            for stage in group.layout.stages
        }

    def _last_transition_s(self) -> float:
        """From decision to commit, as last measured: new requests run from the commit on."""
        for record in reversed(self._transitions.records):
            if record.kind is Kind.DROP and record.committed_s is not None:
                return record.committed_s - record.started_s
        return 0.0

    def _call_off(self, squeezed: tuple[GroupId, ...], now_s: float) -> None:
        for transition in tuple(self._transitions.active.values()):
            is_squeezed = not transition.old_groups.isdisjoint(squeezed)
            if transition.is_restoring and is_squeezed:
                self._transitions.roll_back(transition, "overloaded again", now_s, backs_off=False)

    def _relieve(self, verdict: Overloaded, view: ClusterLoadView, now_s: float) -> None:
        if now_s < self._transitions.backoff_until_s:
            return
        dwelling = self._dwelling(now_s)
        is_enough = self.observation is not None and not self._scaling.is_on
        why = "drops are paused" if self.is_paused else "nothing is left to drop"
        if self._config.policy == "drop" and not self.is_paused:
            fixed = dwelling | self._transitions.refusing(Kind.DROP, now_s)
            drop_view = self._drop_view(fixed, now_s, view.groups)
            plan = plan_of(drop_view, verdict, self._config)
            self._carry_out(plan, verdict.trigger, now_s)
            is_enough = plan.enough or bool(self._transitions.active)
            why = plan.shortfall
        if not is_enough:
            if self._config.park_behind_drop and not dwelling:
                self._allow_parking(verdict.group_ids, now_s)
            reason = f"{verdict.trigger}; {why}"
            self._scaling.grow(verdict.required_blocks, reason, now_s)

    def _allow_parking(self, group_ids: tuple[GroupId, ...], now_s: float) -> None:
        """Tell leaders that nothing is left to drop: twice in the time that they remember it."""
        allowed_s = self._parking_allowed_s
        for group_id in group_ids:
            if now_s - allowed_s.get(group_id, -math.inf) >= self._config.max_park_s / 2.0:
                allowed_s[group_id] = now_s
                leader = self._placement.groups[group_id].layout.leader
                self._outbox.append(Send(leader, AllowParking(group_id)))
        for group_id in allowed_s.keys() - self._placement.groups.keys():
            del allowed_s[group_id]

    def _dwelling(self, now_s: float) -> set[GroupId]:
        """Groups whose last transition was over only now."""
        ends_s = {
            group_id: self._transitions.last_end_s(group.layout)
            for group_id, group in self._placement.groups.items()
        }
        dwell_s = self._config.dwell_s
        return {i for i, end_s in ends_s.items() if end_s is not None and now_s - end_s < dwell_s}

    def _drop_view(self, fixed: Set[GroupId], now_s: float, loads: Iterable[GroupLoad]) -> DropView:
        """``fixed`` groups are not to change, beside those that cannot; ``loads`` are what is known
        better than by reports alone.
        """
        placement, transitions = self._placement, self._transitions
        groups = placement.groups
        return DropView(
            tuple(group.layout for group in groups.values()),
            {group_id: group.load for group_id, group in groups.items()}
            | {load.group_id: load for load in loads},
            self._specs,
            placement.next_id,
            {i for i, group in groups.items() if Act.CHANGE not in group.may} | fixed,
            {group.layout.group_id for group in placement.candidates()},
            transitions.cuts.pairs(now_s),
            transitions.coming_blocks,
            self._prompts.share,
        )

    def _carry_out(self, plan: DropPlan, trigger: str, now_s: float) -> list[TransitionId]:
        """The transitions begun."""
        self._placement.new_ids(len(plan.merges))
        merges = [(merge.old, merge.new) for merge in plan.merges]
        return self._transitions.begin_drops(merges, trigger, now_s)

    def _restore_all(self, verdict: Relaxed, now_s: float) -> list[Excuse]:
        excuses = []
        refusing = self._transitions.refusing(Kind.RESTORE, now_s)
        for group_id in verdict.group_ids:
            if not self._placement.may(group_id, Act.CHANGE):
                continue
            if group_id in refusing:
                excuses.append(Excuse(group_id, "refused", "a member refused the last restore"))
                continue
            begun = self._restore(group_id, verdict.trigger, now_s)
            if isinstance(begun, Postponed):
                reason = f"restore postponed: {begun.reason}"
                excuses.append(Excuse(group_id, begun.cause, reason))
        return excuses

    def _restore(self, group_id: GroupId, trigger: str, now_s: float) -> TransitionId | Postponed:
        group = self._placement.groups[group_id]
        if not group.is_reported:
            return Postponed("unreported", "its load is not known yet")
        plan = plan_restore(
            group.layout,
            self._specs,
            group.report,
            first_id=self._placement.next_id,
            holders=self._holders(group.layout),
        )
        if isinstance(plan, Postponed):
            return plan

        self._placement.new_ids(len(plan.new))

        def load(transition_id: TransitionId) -> LoadLayers:
            return LoadLayers(transition_id, group_id, plan.capacity_blocks, plan.members)

        return self._transitions.begin_restore(plan.old, plan.new, load, trigger, now_s)

    # Admin

    def force_drop(self, num_bytes: int | None, now_s: float) -> list[TransitionId]:
        """Drop at least that much, or by one merge; empty when nothing can be dropped."""
        blocks = 1 if num_bytes is None else blocks_for_bytes(num_bytes, self._placement.specs)
        view = self._drop_view(self._transitions.refusing(Kind.DROP, now_s), now_s, ())
        plan = plan_forced(view, blocks, self._config)
        if not plan.merges:
            # Whoever asks may know that it would succeed now. If not, the members will say so.
            view = replace(self._drop_view(set(), now_s, ()), apart=())
            plan = plan_forced(view, blocks, self._config)
        return self._carry_out(plan, "admin", now_s)

    def force_restore(self, now_s: float) -> list[TransitionId | Postponed]:
        """Restore every dropped group, where it is possible now."""
        if self._pipeline_stages > 1:  # they would be formed again at once
            return [Postponed("pipelines", "the pipelines stand from the start, and for good")]
        return [
            self._restore(group.layout.group_id, "admin", now_s)
            for group in self._placement.that_may(Act.CHANGE)
            if len(group.layout.stages) > 1
        ]


def _paused(verdict: Verdict) -> list[Excuse]:
    """What is not done while drops and restores are paused."""
    excuses = []
    if verdict.overloaded is not None:
        reason = f"drops are paused; {verdict.overloaded.trigger}"
        excuses += [Excuse(group, "paused", reason) for group in verdict.overloaded.group_ids]
    if verdict.relaxed is not None:
        reason = f"restores are paused; {verdict.relaxed.trigger}"
        excuses += [Excuse(group, "paused", reason) for group in verdict.relaxed.group_ids]
    return excuses
