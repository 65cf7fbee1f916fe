"""The scheduler's way to form microbatches, and what it remembers from one to the next."""

from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.policy.batch_form import FormationView, Microbatch, form_token_budget
from kunserve.policy.lookahead import Course, Lookahead, form_lookahead

BY_TOKENS = CostCoefficients(attention_s=0.0, token_s=1.0, chunk_s=0.0, shared_s=0.0)
"""Where nobody gave coefficients: every token costs the same."""


class BatchFormer:
    """Implements ``FormBatch``. Owner of the course that the last formation set."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._how: Lookahead | None = None
        if config.lookahead:
            self._how = Lookahead(config.cost or BY_TOKENS, config.min_microbatch_tokens)
        self._course: Course | None = None

    def __call__(self, view: FormationView) -> Microbatch:
        """The next microbatch."""
        if self._how is None:
            return form_token_budget(view)
        batch, self._course = form_lookahead(view, self._course, self._how)
        return batch
