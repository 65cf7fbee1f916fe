"""What part of the cluster's compute prompts took lately, by what leaders report."""

import math

from kunserve.control.cluster.placement import Placement
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import InstanceId
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.drop.worth import LATELY_S

LOOK_GAP_S = 0.1
"""Reports come so often."""


class PromptShare:
    """Counts prompt tokens by leader, whatever groups it leads."""

    def __init__(
        self, step_tokens: int, cost: CostCoefficients | None, placement: Placement
    ) -> None:
        """``step_tokens``: the most that a step computes."""
        self._placement = placement
        self._token_s: float | None = None
        """Of an instance's time, in a step that is full of one prompt."""
        if cost is not None:
            self._token_s = float(batch_cost(cost, [0], [step_tokens])) / step_tokens
        self._counted: dict[InstanceId, int] = {}
        self._tokens_per_s = 0.0
        """Of an instance, smoothed."""
        self._seen_s: float | None = None

    @property
    def share(self) -> float:
        """From 0 to about 1; infinite where nobody knows what a token takes."""
        return math.inf if self._token_s is None else self._tokens_per_s * self._token_s

    def look(self, now_s: float) -> None:
        """Called at every look at the load."""
        elapsed_s = math.inf if self._seen_s is None else now_s - self._seen_s
        if self._token_s is None or elapsed_s < LOOK_GAP_S:
            return
        self._seen_s = now_s
        groups = [group for group in self._placement.groups.values() if group.is_reported]
        counted = {group.layout.leader: group.report.totals.prompt_tokens for group in groups}
        tokens = sum(
            max(0, total - self._counted.get(leader, total)) for leader, total in counted.items()
        )
        # Who leads no group now may lead one again, and goes on counting.
        stays = self._placement.specs.keys()
        self._counted = {i: n for i, n in self._counted.items() if i in stays} | counted
        num_instances = sum(len(group.layout.stages) for group in groups)
        if num_instances and math.isfinite(elapsed_s):
            rate = tokens / elapsed_s / num_instances
            weight = 1.0 - math.exp(-elapsed_s / LATELY_S)
            self._tokens_per_s += weight * (rate - self._tokens_per_s)
