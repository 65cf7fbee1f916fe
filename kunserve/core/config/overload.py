"""Settings of the mechanism: when layers are dropped, and when they come back."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

OverloadPolicy: TypeAlias = Literal["recompute", "swap", "park", "migrate", "observe", "drop"]
MAX_PARK_S = 10.0
_overload = partial(Flag, "Overload")


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """When to drop and when to restore."""

    policy: Annotated[OverloadPolicy, _overload("--overload-policy")] = "drop"
    """When KV memory runs out: drop frees replicated layers; recompute preempts requests; swap
    sends their KV to host memory; park sends that of long answers there, for others to begin;
    migrate moves running requests to other instances; observe preempts too, and tells in the log
    and in /metrics what drop would have done."""
    dwell_s: Annotated[float, _overload("--dwell", least=0.0, most=3600.0)] = 2.0
    """Seconds between two transitions of one group, at least. Raise it if groups drop and restore
    in turns."""
    restore_below: Annotated[float, _overload(least=0.0, most=1.0)] = 0.5
    """Restore when demand is under this share of the undropped KV memory. 0: never."""
    restore_hold_s: Annotated[float, _overload("--restore-hold", least=0.0, most=3600.0)] = 3.0
    """Seconds that demand must stay there. Raise it above the pauses between your bursts, and each
    burst finds the memory it needs; lower it, and tokens are fast again sooner."""
    max_group_size: Annotated[int | None, _overload(least=2)] = None
    """Most instances that may share one copy of the weights [no limit]. 2 keeps pipelines short,
    and tokens fast."""
    min_deep_gain: Annotated[float, _overload(least=0.0)] = 0.2
    """Memory that a pipeline of more than two stages must add, as a share of what it had. A deeper
    one frees less, and is slower."""
    max_queue_per_gain: Annotated[float, _overload(least=0.0, most=1e9)] = 1.0
    """Pairs that add little memory are made while what waits and finds no room is at most so many
    times what they free; for deeper pipelines it is one less. A longer queue waits for compute, of
    which pipelines have less.

    See ``policy/drop/worth.py``.
    """
    max_park_s: Annotated[float, _overload(above=0.0, most=3600.0)] = MAX_PARK_S
    """Longest pause of an answer that is parked in host memory, in seconds. Longer pauses let more
    requests begin."""
    park_behind_drop: Annotated[bool, _overload()] = False
    """With drop: park answers where memory is short and nothing is left to drop."""
    place_aware: bool = True
    """Whether groups that stand near each other merge first, and layers come from the nearest
    holder. Only the simulator can do otherwise, to compare."""

    def __post_init__(self) -> None:
        """Parking is a second line of ``drop`` only."""
        if self.park_behind_drop and self.policy != "drop":
            raise ConfigError(f"park_behind_drop goes with policy 'drop', not {self.policy!r}")
        if not 0.0 < self.max_park_s < math.inf:
            raise ConfigError(f"max_park_s must be above 0 and finite, not {self.max_park_s}")
        if self.max_park_s != MAX_PARK_S and not (self.policy == "park" or self.park_behind_drop):
            raise ConfigError(
                f"max_park_s goes with policy 'park' or with park_behind_drop, not {self.policy!r}"
            )

    @property
    def uses_host_memory(self) -> bool:
        """Whether KV may go to host memory."""
        return self.policy in ("swap", "park") or self.park_behind_drop
