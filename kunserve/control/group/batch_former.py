"""The scheduler's way to form microbatches: from what, and with what memory."""

from collections.abc import Iterable

from kunserve.control.group.sequence import Progress, Sequence
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


def collect_runnable(
    running: Iterable[Sequence],
) -> tuple[list[Sequence], list[Sequence], int, int]:
    """Running sequences that could decode, that could prefill; how many await a token, and
    their context together.

    The last token of a prompt is no decode: it keeps its place before later prompts.
    """
    decodes: list[Sequence] = []
    prompts: list[Sequence] = []
    num_awaiting = context = 0
    runs = Progress.RUNNING
    for seq in running:
        if seq.is_awaiting:
            num_awaiting += 1
            context += seq.num_computed
        elif seq.state is runs:
            computed = seq.num_computed
            if computed >= seq.num_prompt and len(seq.token_ids) - computed == 1:
                decodes.append(seq)
            else:
                prompts.append(seq)
    return decodes, prompts, num_awaiting, context
