"""Settings of a group's scheduler, and of speculative decoding."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

_batches = partial(Flag, "Batches")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding by prompt lookup, with vLLM's names."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    """Guesses of one request that a step checks, at most."""
    prompt_lookup_min: int = 2
    """A guess is what followed so many equal tokens at least."""
    prompt_lookup_max: int = 4
    """More equal tokens than this make no better guess."""

    def __post_init__(self) -> None:
        """Numbers that mean nothing are a mistake."""
        if self.method != "ngram":
            raise ConfigError(
                f'the method of speculation must be "ngram" (prompt lookup), not {self.method!r}; '
                "no draft models are loaded"
            )
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens must be at least 1, not {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, not "
                f"{self.prompt_lookup_min} of {self.prompt_lookup_max}"
            )


SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one group's scheduler."""

    max_num_seqs: Annotated[int, _batches(least=1)] = 256
    """Requests that run at once, per group."""
    max_num_batched_tokens: Annotated[int, _batches(least=1)] = 512
    """Most tokens in one step. With --tpot-slo steps may be smaller, never larger."""
    tpot_slo_s: Annotated[float | None, _batches("--tpot-slo", above=0)] = None
    """Seconds that a request may wait for its next token. Steps take half of it, and up to all of
    it while prompts queue and memory is not short; where they may not be larger, next tokens skip
    steps. Needs `kunserve profile` [next tokens in every step, however long it takes]."""
    scheduling_policy: Annotated[SchedulingPolicy, _batches()] = "fcfs"
    """fcfs: who comes first is served first; priority: requests may have a `priority`. Lower ones
    are served first, and make way last when memory is short."""
    scheduler_reserve_full_isl: Annotated[bool, _batches()] = True
    """Requests are admitted when their whole prompts fit. Off: when their next chunks do."""
    watermark: float = 0.01
    """Share of the KV memory that an admission leaves free, so that it does not preempt at once."""
    enable_prefix_caching: Annotated[bool, _batches()] = True
    """Keep the KV of prompts and answers while memory is free, and compute only what comes after
    the longest beginning that is kept."""
    async_scheduling: Annotated[bool, _batches()] = True
    """On a device, ask for the next step while one is computed."""
    speculative_config: Annotated[SpeculativeConfig | None, _batches()] = None
    """Guess ahead by prompt lookup, as JSON: {"method": "ngram", "num_speculative_tokens": 4,
    "prompt_lookup_min": 2, "prompt_lookup_max": 4}. Outputs stay the same. Steps check guesses
    where that gives more tokens in the same time: in small batches, and where answers repeat their
    prompts."""
    lookahead: Annotated[bool, _batches()] = True
    """In a pipeline, balance microbatches by predicted time over the whole queue."""
    min_microbatch_tokens: int = 64
    """Lookahead makes no smaller microbatches to have more of them."""
    profile: Annotated[str | None, _batches()] = None
    """Costs measured by `kunserve profile` [where it writes by default]."""
