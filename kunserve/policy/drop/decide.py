"""The decision to drop: one for ``drop``, of the groups that stand, and for ``observe``, of those
that would stand.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import GroupLoad
from kunserve.policy.dispatch.redispatch import spare_blocks
from kunserve.policy.drop.capacity import Specs
from kunserve.policy.drop.monitor import Overloaded
from kunserve.policy.drop.plan import DropPlan, Limits, Pair, Standing, Wanted, plan_drop
from kunserve.policy.drop.worth import Queue, plan_worth, unplaced_blocks

HEAD_COST_LAYERS = 1
"""What the output head costs the last stage, in layers: the least, so that this stage is a shorter
one where layers do not divide evenly. More would take memory from stages that hold more layers."""


@dataclass(frozen=True, slots=True)
class DropView:
    """All that the decision looks at."""

    layouts: tuple[GroupLayout, ...]
    loads: Mapping[GroupId, GroupLoad]
    """Of each of them, reported or not."""
    specs: Specs
    """Of all instances, with the places that are to be looked at."""
    first_id: GroupId
    untouchable: Set[GroupId]
    """Groups that must not change now."""
    candidates: Set[GroupId]
    """Groups that may be sent requests."""
    apart: tuple[Pair, ...]
    """Instances that do not reach each other."""
    coming_blocks: int
    """What transitions under way will free."""
    prompt_share: float
    """Of the compute, taken by prompts lately."""


def plan_of(view: DropView, wanted: Overloaded, config: OverloadConfig) -> DropPlan:
    """What is merged for a shortage, if it is worth it."""
    loads = tuple(view.loads.values())
    queue = Queue(
        unplaced_blocks((load for load in loads if load.is_reported), view.coming_blocks),
        capacity_blocks=sum(load.capacity_blocks for load in loads),
        prompt_share=view.prompt_share,
        most=config.max_queue_per_gain,
    )
    elsewhere = view.candidates - frozenset(wanted.group_ids)
    others = (load for load in loads if load.group_id in elsewhere)
    drop = Wanted(
        wanted.required_blocks,
        wanted.group_ids,
        wanted.waiting_blocks,
        spare_blocks(others, wanted.largest_waiting_blocks),
        patience_s=wanted.wait_s,
    )
    return plan_worth(_standing(view), drop, _limits(view, config, config.min_deep_gain), queue)


def plan_forced(view: DropView, required_blocks: int, config: OverloadConfig) -> DropPlan:
    """What is merged because somebody asks for it, whatever it is worth."""
    return plan_drop(_standing(view), Wanted(required_blocks), _limits(view, config, 0.0))


def _standing(view: DropView) -> Standing:
    used_blocks = {group_id: load.report.used_blocks for group_id, load in view.loads.items()}
    return Standing(view.layouts, view.specs, view.first_id, used_blocks)


def _limits(view: DropView, config: OverloadConfig, min_deep_gain: float) -> Limits:
    return Limits(
        view.untouchable, view.apart, config.max_group_size, min_deep_gain, HEAD_COST_LAYERS
    )
