"""Which steps last so long that mail is read in the middle of them."""

from kunserve.core.step import StepPlan

LONG_STEP_S = 0.1
"""Once a step has taken so long, mail is read in the middle of steps of as many tokens."""


class LongSteps:
    """Owner of how many tokens the smallest steps have that last.

    A step in which mail is read is a call per layer, which costs short steps a part of their
    time. So a long prompt says nothing of the decodes that come after it.
    """

    def __init__(self) -> None:
        self._least_tokens: int | None = None
        """None before the first that lasted."""

    def may_last(self, plan: StepPlan) -> bool:
        """Whether a step of as many tokens has lasted."""
        return self._least_tokens is not None and plan.num_tokens >= self._least_tokens

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """So long took a step."""
        if seconds >= LONG_STEP_S:
            self._least_tokens = min(self._least_tokens or plan.num_tokens, plan.num_tokens)
        elif self.may_last(plan):
            self._least_tokens = plan.num_tokens + 1
