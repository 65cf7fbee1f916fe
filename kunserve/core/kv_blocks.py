"""How many KV blocks a request's tokens take, and which of them has what.

Where every layer sees every token, block ``c`` of a request has tokens [c * b, (c + 1) * b) over
all layers. Nothing else is true of most models, and nothing else is asked of the others unless
their layers with a window keep no more than they need: a *ring*.

A model with windows repeats a *period* of layers: all have the window but the last, which sees
every token (Gemma 2 and 3). With a ring of m blocks and a period of P layers

* blocks [0, m) of a request are as above, and layers with a window write them over: tokens
  [c * b, (c + 1) * b) of these layers lie in block c mod m;
* every block behind them is a *long* one. It has no layer with a window, but P times as many
  tokens of the others: of each period the places of all P layers belong to the last of them.

So all blocks have the same bytes on any stage that holds whole periods, and whoever only counts
them knows of rings by ``KvBlocks`` alone.
"""

from typing import NamedTuple

from kunserve.core.errors import ConfigError


class KvRing(NamedTuple):
    """See the module."""

    num_blocks: int
    period: int
    """Layers."""


class KvBlocks(NamedTuple):
    """How the blocks of one request hold its tokens."""

    block_size: int
    """Tokens; of a long block, those of each place of a period."""
    ring: KvRing | None = None
    """None: KV of every layer is kept whole."""

    @property
    def period(self) -> int:
        """Stages are cut between so many layers only."""
        return 1 if self.ring is None else self.ring.period

    def holding(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        num_blocks = -(-num_tokens // self.block_size)
        ring = self.ring
        if ring is None or num_blocks <= ring.num_blocks:
            return num_blocks
        return ring.num_blocks - (ring.num_blocks - num_blocks) // ring.period

    def tokens_in(self, num_blocks: int) -> int:
        """The most tokens that so many blocks hold."""
        if self.ring is not None:
            num_blocks += max(0, num_blocks - self.ring.num_blocks) * (self.ring.period - 1)
        return num_blocks * self.block_size

    def local_block(self, number: int) -> int:
        """Which block of the request has its ``number``-th ``block_size`` tokens, of a layer with
        a window.
        """
        return number if self.ring is None else number % self.ring.num_blocks

    def global_place(self, number: int) -> tuple[int, int]:
        """The same of a layer that sees every token, and in the place of which layer: so many
        layers before it.
        """
        if self.ring is None or number < self.ring.num_blocks:
            return number, 0
        more, turn = divmod(number - self.ring.num_blocks, self.ring.period)
        return self.ring.num_blocks + more, self.ring.period - 1 - turn


def ring_of(window: int, period: int, block_size: int, step_tokens: int) -> KvRing:
    """The ring of layers that see ``window`` tokens, in steps of no more than ``step_tokens``.

    In a step of c tokens w + c - 1 must lie in different places: those that its first one sees,
    and its own. Guesses that are taken back are tokens of the step before.
    """
    return KvRing(-(-(window + step_tokens - 2) // block_size) + 1, period)


def check_hybrid(device: str, num_ranks: int, caches_prefixes: bool, overload_policy: str) -> None:
    """Raise ConfigError for what does not go with a ring, before a model is known."""
    flag = "--no-disable-hybrid-kv-cache-manager"
    if device != "cpu":
        raise ConfigError(f"{flag} needs --device cpu: other kernels have one block table a step")
    if num_ranks > 1:
        raise ConfigError(f"{flag} computes on one rank: leave --tensor-parallel-size out")
    if caches_prefixes:
        raise ConfigError(
            f"{flag} writes the first blocks of every request over, so that no other request can "
            "share them: give --no-enable-prefix-caching too"
        )
    if overload_policy == "migrate":
        raise ConfigError(
            f"{flag}: a request that decodes writes blocks over that a migration has copied "
            "already, so take another --overload-policy than migrate"
        )
