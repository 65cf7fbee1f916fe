"""How many microbatches of a group may be in flight."""

from dataclasses import dataclass

from kunserve.core.config import SchedulerConfig
from kunserve.policy.batch.decode_split import DecodeSplit


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """A planned microbatch of nothing but decodes, with no prompt in flight beside it."""

    parts: int
    """Into so many microbatches the group's decodes go."""
    num_decodes: int
    """Of the group, in this microbatch and in others."""
    planned_s: float


class Rounds:
    """Owner of what a group knows of its rounds of decodes."""

    def __init__(self, config: SchedulerConfig, num_stages: int) -> None:
        self._most_together = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._split = DecodeSplit(num_stages)

    def next(self, num_decodes: int, now_s: float) -> DecodeRound | None:
        """What a microbatch of decodes would be part of, if it were planned now; None where there
        is nothing to choose, because they are too many for one.
        """
        if not 0 < num_decodes <= self._most_together:
            return None
        return DecodeRound(self._split.parts(num_decodes, now_s), num_decodes, now_s)

    def completed(self, done: DecodeRound, now_s: float, *, is_alone: bool) -> None:
        """The microbatch came back; ``is_alone``: no prompt was planned meanwhile."""
        seconds = now_s - done.planned_s
        self._split.note(done.parts, done.num_decodes, seconds, now_s, is_alone=is_alone)


def rounds_of(config: SchedulerConfig, num_stages: int) -> Rounds | None:
    """None where nothing is to be found out: most groups, whose steps then ask nothing.

    A round with guesses gives more tokens than one without, and so says little.
    """
    measures = config.decode_microbatches == "measured" and config.speculative_config is None
    return Rounds(config, num_stages) if num_stages > 1 and measures else None
