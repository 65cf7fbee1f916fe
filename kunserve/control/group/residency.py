"""How long blocks stay in a prefix cache, and how soon they are used again, as vLLM counts it."""

from kunserve.control.group.prompt_prefix import Prefix
from kunserve.core.load import RESIDENCY_BOUNDS_S, LeaderTotals, one_more


class Residency:
    """Counts into a leader's totals. Who has a clock sets ``now_s`` before the cache is used."""

    def __init__(self, totals: LeaderTotals) -> None:
        self._totals = totals
        self.now_s = 0.0

    def used(self, prefix: Prefix) -> None:
        """A sequence has filled blocks of the prefix, or shares it no more."""
        prefix.used_s = self.now_s
        if prefix.made_s is None:
            prefix.made_s = self.now_s

    def reused(self, prefix: Prefix, num_blocks: int) -> None:
        """A sequence shares so many blocks of the prefix from now on."""
        totals, gap_s = self._totals, max(0.0, self.now_s - prefix.used_s)
        totals.reuse_gaps = one_more(totals.reuse_gaps, RESIDENCY_BOUNDS_S, gap_s, num_blocks)
        totals.reuse_gap_s += gap_s * num_blocks
        self.used(prefix)

    def evicted(self, prefix: Prefix, num_blocks: int) -> None:
        """So many blocks of the prefix make room for others."""
        totals, idle_s = self._totals, max(0.0, self.now_s - prefix.used_s)
        lived_s = idle_s if prefix.made_s is None else max(0.0, self.now_s - prefix.made_s)
        bounds = RESIDENCY_BOUNDS_S
        totals.block_lives = one_more(totals.block_lives, bounds, lived_s, num_blocks)
        totals.block_lived_s += lived_s * num_blocks
        totals.block_idles = one_more(totals.block_idles, bounds, idle_s, num_blocks)
        totals.block_idle_s += idle_s * num_blocks
