"""What happens in a life of a ``ChaosCluster``: plain values, which Hypothesis shrinks."""

from typing import NamedTuple

from kunserve.core.config import ClusterConfig, OverloadConfig
from kunserve.core.plan import SwapPlan


class Load(NamedTuple):
    """Requests arrive."""

    num_requests: int
    num_prompt: int
    max_tokens: int
    is_poison: bool
    num_common: int = 0


class Run(NamedTuple):
    """Things happen, in an order drawn from the seed; pulls fail now and then."""

    num_actions: int
    seed: int


class Wait(NamedTuple):
    """Time passes, and nothing happens."""

    seconds: float


class Endure(NamedTuple):
    """Fair time passes."""

    seconds: float
    num_open: int
    """Requests that are under way all the time, at least."""


class Harm(NamedTuple):
    """One of what can go wrong, or be asked for by hand. ``which`` chooses among whom it may."""

    kind: str
    which: int


Happening = Load | Run | Wait | Endure | Harm


class Setting(NamedTuple):
    """What a cluster has beside instances."""

    num_instances: int
    pool: int = 12
    swap: SwapPlan | None = None
    guesses: bool = False
    overload: OverloadConfig | None = None
    size: ClusterConfig | None = None
    ranks: tuple[int, ...] = ()
    max_num_seqs: int = 8
    later_pools: tuple[int, ...] = ()
    """KV blocks of instances that come later. Who has fewer than the first ones is refused."""
    windows: tuple[int, int] | None = None
    """As for ``FakeCluster``. Nothing is shared or migrated with it."""
