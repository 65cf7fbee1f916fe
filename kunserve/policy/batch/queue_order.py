"""Whose turn it is among waiting requests."""

from dataclasses import dataclass

from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch.cost import own_cost

SLACK = 2.0
"""A first token is due when a request has been here so many times as long as its own prompt takes.
"""
MOST_S = 30.0
"""A first token is due so long after the arrival at the latest. So nobody is passed by a request
that comes this much later, and nobody starves."""


@dataclass(frozen=True, slots=True)
class DeadlineOrder:
    """Whose first token is due first comes first: short prompts pass long ones, for a while."""

    cost: CostCoefficients

    def due_s(self, arrival_s: float, num_prompt_tokens: int) -> float:
        """When the first token of a request is due."""
        return arrival_s + min(MOST_S, SLACK * own_cost(self.cost, 0, num_prompt_tokens))


def choose_order(config: SchedulerConfig) -> DeadlineOrder | None:
    """None is the order of arrival."""
    if config.scheduling_policy == "fcfs":
        return None
    assert config.cost is not None, "a server takes costs from a profile or assumes them"
    return DeadlineOrder(config.cost)
