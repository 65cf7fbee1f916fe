"""For how much of its prompt a sequence has memory before that is computed."""

from kunserve.core.config import SchedulerConfig


def reserved_tokens(num_known: int, num_computed: int, config: SchedulerConfig) -> int:
    """Tokens whose blocks a sequence of ``num_known`` tokens has while it may run.

    All that are known, so that a prompt never runs out half-way; or no more than its next step
    computes, as in plain chunked prefill (Sarathi): who came later is then preempted for the rest.
    """
    if config.scheduler_reserve_full_isl:
        return num_known
    return min(num_known, num_computed + config.max_num_batched_tokens)
