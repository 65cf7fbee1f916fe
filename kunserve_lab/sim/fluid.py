"""What a burst does to the time to first token, as a flow of requests through one instance.

The instance stands for a cluster whose instances are loaded alike. Requests flow in at a base rate,
and at a higher one during the burst. They wait in order until KV memory has room for their prompt,
then until their prompt is computed, then they decode. Memory that is full is followed by a drop,
where there may be one: the group gets deeper, has more memory and another step time.

Rates are in `X`, the requests per second that an instance sustains when its memory is full.

What the model leaves out, all of which makes real queues longer: arrivals are even, so chance does
not bunch them; instances are loaded alike; nobody is preempted; a drop takes no time but
``DROP_S``, and its exchange stalls nobody; pipelines have no bubbles. Restores are left out too.
Whether a drop is worth it, the controller's own rule says (``policy/drop/worth.py``).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kunserve.core.config import OverloadConfig
from kunserve.policy.drop.monitor import HEADROOM
from kunserve.policy.drop.worth import LATELY_S, deepest_worth
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.sim.steady import Array, RequestMix, StepTable

TICK_S = 0.5
DROP_S = 0.6
"""From full memory to the memory of a drop: decision, agreement, remap."""
BEFORE_S, AFTER_S = 45.0, 60.0
"""Of base rate around the burst. P99 is over all who arrive from the first to the last second."""
DRAIN_S = 120.0
"""Time in which the last to come get their first token. Longer waits count as this long."""
NUM_STAGES = 4
"""Steps of equal length in which a request of a class decodes: they spread its end a little."""
_SAMPLES = 100
"""Requests whose wait is read off a flow, each combined with every length of a prompt."""
_NUM_SHARES = 129
"""Numbers of decodes, evenly from none to all that may run, for which prompts are timed."""
MOST_QUEUE_PER_GAIN = OverloadConfig().max_queue_per_gain
PROMPT_WEIGHT = 1.0 - math.exp(-TICK_S / LATELY_S)
"""Of the last tick, in what prompts took lately: as the controller smooths it."""
_EMPTY = 1e-6
"""Requests that are none."""
_BASE_MOST = 0.98
"""A higher base rate has no steady state to begin with."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one instance can do for requests of one mix. Times are seconds, rates per second."""

    mix: RequestMix
    table: StepTable
    depths: tuple[int, ...]
    """Instances of a group: alone, then as drops make them."""
    pools_tokens: Array
    """KV of an instance: alone, then as a member of a pair, of a four, while a drop is worth it."""
    unused_tokens: float
    """What stays free of a full memory on average, because the next prompt does not fit in it."""
    own_s: Array
    """Seconds of each prompt of the mix alone: by level of depth, and by decodes beside it."""
    num_full: float
    """Requests that decode when memory is full (or ``max_num_seqs`` is reached)."""
    full_rate: float
    """X: requests per second when memory is full."""
    compute_rate: float
    """C: requests per second whose prompts can be computed beside a full set of decodes."""
    seats_bind: bool
    """Whether ``max_num_seqs`` is reached before memory is full."""

    @property
    def residence_s(self) -> float:
        """R: how long a request decodes when memory is full."""
        return self.num_full / self.full_rate

    @property
    def gain(self) -> float:
        """KV memory that all drops add, as a share of what there was."""
        return float(self.pools_tokens[-1] / self.pools_tokens[0] - 1)

    @property
    def removable_s(self) -> float:
        """Queueing that drops remove at most: Little's law for what fits in their memory."""
        added = float(self.pools_tokens[-1] - self.pools_tokens[0])
        return added / self.mix.context_tokens / self.full_rate

    def floor_s(self, base: float) -> float:
        """P99 of the time to first token when nobody waits, at ``base`` times X."""
        num = _steady(self, np.array([min(base, _BASE_MOST)]))
        return float(np.percentile(self.own_s[0, self.share_of(num)], 99))

    def share_of(self, num: Array) -> npt.NDArray[np.int64]:
        """Where in ``own_s`` so many decodes are."""
        shares = np.rint(num / self.table.max_seqs * (_NUM_SHARES - 1))
        return np.minimum(shares, _NUM_SHARES - 1).astype(np.int64)

    def most_gain(self, base: float) -> float:
        """The rule: how many times lower drops can make P99 TTFT at most."""
        return 1 + self.removable_s / self.floor_s(base)


def capacity_of(
    profile: InstanceProfile,
    mix: RequestMix,
    *,
    num_instances: int,
    max_tokens: int,
    max_seqs: int,
) -> Capacity:
    """Of an instance of this make under these limits of the scheduler."""
    depths = _depths(profile, num_instances)
    pools = np.array([_pool_tokens(profile, depth) for depth in depths])
    table = StepTable(profile, mix, depths, max_tokens, max_seqs)
    unused = min(_half_a_prompt(mix), pools[0] / 2)
    own_s = _own_s(table, mix, len(depths))
    empty = Capacity(mix, table, depths, pools, unused, own_s, 1.0, 1.0, 1.0, False)
    by_memory = (pools[0] - unused) / mix.context_tokens
    num_full, rate = _fullest(empty, min(by_memory, table.max_seqs))
    budget = max(1.0, table.max_tokens - num_full)
    beside_s = table.seconds(_zeros(1), np.array([num_full]), np.array([budget]))[0]
    compute_rate = float(budget / beside_s / mix.mean_input_tokens)
    return replace(
        empty,
        num_full=num_full,
        full_rate=rate,
        compute_rate=compute_rate,
        seats_bind=by_memory > table.max_seqs,
    )


def _depths(profile: InstanceProfile, num_instances: int) -> tuple[int, ...]:
    """Depths of groups that drops reach: each doubles the one before, and must be worth it."""
    depths, least = [1], OverloadConfig().min_deep_gain
    while 2 * depths[-1] <= min(num_instances, profile.spec.num_layers):
        deeper = 2 * depths[-1]
        gain = _pool_tokens(profile, deeper) / _pool_tokens(profile, depths[-1]) - 1
        if deeper > 2 and gain < least:
            break
        depths.append(deeper)
    return tuple(depths)


def _pool_tokens(profile: InstanceProfile, depth: int) -> float:
    """KV tokens of an instance in groups of this depth."""
    spec = profile.spec
    freed = spec.num_layers * spec.layer_bytes * (1 - 1 / depth)
    return profile.pool_tokens + freed / (spec.num_layers * spec.unit_bytes) * spec.block_size


def _half_a_prompt(mix: RequestMix) -> float:
    """Of the prompts in which a token of a prompt lies: half of their mean length."""
    prompts = mix.prompt_tokens
    return float((prompts**2).mean() / prompts.mean() / 2)


def _fullest(capacity: Capacity, num: float) -> tuple[float, float]:
    """So many decodes at most, whose prompts a step's token budget can still bring; their rate."""
    table, mix = capacity.table, capacity.mix
    each = mix.mean_input_tokens / mix.mean_output_tokens
    num = min(num, table.max_tokens / (1 + each))
    seconds = table.seconds(_zeros(1), np.array([num]), np.array([num * each]))[0]
    return num, float(num / (mix.mean_output_tokens * seconds))


def _steady(capacity: Capacity, base: Array) -> Array:
    """Requests that decode at ``base`` times X before the burst comes."""
    table, mix, rate = capacity.table, capacity.mix, base * capacity.full_rate
    num = base * capacity.num_full
    for _ in range(60):
        num = np.minimum(num, capacity.num_full)
        seconds = table.seconds(
            _zeros(num), num, num * mix.mean_input_tokens / mix.mean_output_tokens
        )
        num = (num + rate * mix.mean_output_tokens * seconds) / 2
    return num


def _zeros(like: int | Array) -> npt.NDArray[np.int64]:
    return np.zeros(like if isinstance(like, int) else like.shape, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Bursts to put the question for, elementwise. Heights and base are in X."""

    height: Array
    length_s: Array
    base: Array


@dataclass(frozen=True, slots=True)
class Flow:
    """What each burst does. Times are seconds."""

    p99_s: Array
    """P99 of the time to first token."""
    waits_for_memory: npt.NDArray[np.bool_]
    """Whether anybody waited because memory was full."""
    waits_for_seats: npt.NDArray[np.bool_]
    """Whether anybody waited although memory had room, because ``max_num_seqs`` ran."""
    waits_for_compute: npt.NDArray[np.bool_]
    """Whether anybody waited although there was room, because prompts took all compute."""


def flow(capacity: Capacity, bursts: Bursts, *, drops: bool, endless: bool = False) -> Flow:
    """Let each burst through. ``endless`` memory is never full."""
    tank = _Tank(capacity, bursts.base, drops, endless)
    horizon_s = float(bursts.length_s.max()) + AFTER_S + DRAIN_S
    num_ticks = int(horizon_s / TICK_S) + 1
    arrived = np.zeros((num_ticks + 1, len(bursts.height)))
    started, num, level = arrived.copy(), arrived.copy(), _zeros(arrived)
    num[0] = tank.num
    for tick in range(num_ticks):
        now_s = tick * TICK_S
        in_burst = np.minimum(np.maximum(bursts.length_s - now_s, 0.0) / TICK_S, 1.0)
        factor = in_burst * bursts.height + (1 - in_burst) * bursts.base
        new = factor * capacity.full_rate * TICK_S
        arrived[tick + 1] = arrived[tick] + new
        started[tick + 1] = started[tick] + tank.step(new)
        num[tick + 1], level[tick + 1] = tank.num, tank.level
    p99_s = np.array(
        [
            _p99_s(capacity, bursts.base[i] * capacity.full_rate, bursts.length_s[i] + AFTER_S,
                   arrived[:, i], started[:, i], num[:, i], level[:, i])
            for i in range(len(bursts.height))
        ]
    )  # fmt: skip
    return Flow(p99_s, tank.was_short, tank.was_seated, tank.was_late)


class _Tank:
    """The instance under each burst: who waits, who computes a prompt, who decodes."""

    def __init__(self, capacity: Capacity, base: Array, drops: bool, endless: bool) -> None:
        self._capacity = capacity
        mix = capacity.mix
        usable = capacity.pools_tokens - capacity.unused_tokens
        self._pools = np.full(1, np.inf) if endless else usable
        self._top = len(self._pools) - 1 if drops else 0
        self.level = _zeros(base)
        self._merging_s = np.zeros(len(base))
        """Since a drop was decided; 0 while none is."""
        self._unplaced = np.zeros(len(base))
        """Tokens that found no room at the last tick."""
        self._prompt_share = np.zeros(len(base))
        """Of the compute, taken by prompts lately."""
        self._waiting = np.zeros(len(base))
        self._uncomputed = np.zeros(len(base))
        """Requests that are admitted and whose prompt is not computed yet."""
        self.num = _steady(capacity, np.minimum(base, _BASE_MOST))
        shares = mix.output_tokens / mix.output_tokens.sum()
        self._decoding = self.num[:, None, None] * shares[:, None] / NUM_STAGES
        self._decoding = np.repeat(self._decoding, NUM_STAGES, axis=2)
        """By burst, class and stage of decoding."""
        midst = (np.arange(NUM_STAGES) + 0.5) / NUM_STAGES
        self._context = mix.input_tokens[:, None] + mix.output_tokens[:, None] * midst
        self._pace = NUM_STAGES / mix.output_tokens[:, None]
        step_tokens = np.array([capacity.table.max_tokens])
        step_s = capacity.table.seconds(_zeros(1), np.zeros(1), step_tokens)
        self._token_s = float(step_s[0] / step_tokens[0])
        """Of an instance's time, in a step that is full of one prompt."""
        self._tokens = np.zeros(len(base))
        """Of prompts in a step, as it was in the last tick: where the next search begins."""
        self.was_short = np.zeros(len(base), dtype=np.bool_)
        self.was_seated = self.was_short.copy()
        self.was_late = self.was_short.copy()

    def step(self, new: Array) -> Array:
        """One tick. Returns how many requests had their prompts computed."""
        self._waiting += new
        self._admit()
        done, decode_tokens = self._compute()
        self._decode(done, decode_tokens)
        return done

    def _admit(self) -> None:
        mix, table = self._capacity.mix, self._capacity.table
        used = np.einsum("bcs,cs->b", self._decoding, self._context)
        used += self._uncomputed * mix.mean_input_tokens
        room = (self._pools[self.level] - used) / mix.mean_input_tokens
        seats = table.max_seqs - self.num - self._uncomputed
        turns = self._computable() - self._uncomputed
        least = np.minimum(np.minimum(room, seats), turns)
        admitted = np.minimum(np.maximum(least, 0.0), self._waiting)
        self._waiting -= admitted
        self._uncomputed += admitted
        waits = self._waiting > _EMPTY
        is_short = waits & (room <= seats) & (room <= turns)
        self.was_short |= is_short
        self.was_seated |= waits & (seats < room) & (seats <= turns)
        self.was_late |= waits & (turns < room) & (turns < seats)
        self._merge(is_short, used + admitted * mix.mean_input_tokens)

    def _merge(self, is_short: npt.NDArray[np.bool_], used: Array) -> None:
        """Decide drops, and make those that were decided."""
        mix, pools = self._capacity.mix, self._capacity.pools_tokens
        asks = is_short & (self.level < self._top) & (self._merging_s == 0.0)
        decided = self._merging_s > 0.0
        for at in np.flatnonzero(asks):
            decided[at] = self._is_worth(
                int(self.level[at]), float(self._unplaced[at]), float(self._prompt_share[at])
            )
        self._merging_s = np.where(is_short & decided, self._merging_s + TICK_S, 0.0)
        merges = self._merging_s >= DROP_S
        self.level = self.level + merges
        self._merging_s[merges] = 0.0
        free = np.maximum(0.0, (1.0 - HEADROOM) * pools[self.level] - used)
        self._unplaced = np.maximum(0.0, self._waiting * mix.mean_input_tokens - free)

    def _computable(self) -> Array:
        """Requests whose prompts a tick can compute, and the one that is computed in part. Others
        wait without memory, as in the scheduler.
        """
        table, each = self._capacity.table, self._capacity.mix.mean_input_tokens
        most = np.maximum(1.0, table.max_tokens - self.num)
        return most * TICK_S / table.seconds(self.level, self.num, most) / each + 1.0

    def _is_worth(self, level: int, unplaced: float, prompt_share: float) -> bool:
        """Whether a merge into the next level is, while so much of an instance's queue finds no
        room, and prompts took so much of the compute lately.
        """
        pools = self._capacity.pools_tokens
        gains = (
            (self._capacity.depths[deeper], max(0.0, float(pools[deeper] - pools[level])))
            for deeper in range(1, len(pools))
        )
        deepest = deepest_worth(
            gains, unplaced, MOST_QUEUE_PER_GAIN, float(pools[level]), prompt_share
        )
        return deepest >= self._capacity.depths[level + 1]

    def _compute(self) -> tuple[Array, Array]:
        """Prompts computed in a tick, and tokens of each decode."""
        table, each = self._capacity.table, self._capacity.mix.mean_input_tokens
        most = np.maximum(1.0, table.max_tokens - self.num)
        wanted = self._uncomputed * each / TICK_S
        tokens = self._tokens
        for _ in range(2):
            seconds = table.seconds(self.level, self.num, tokens)
            tokens = np.minimum(most, wanted * seconds)
        self._tokens = tokens
        seconds = table.seconds(self.level, self.num, tokens)
        done = np.minimum(self._uncomputed, tokens * TICK_S / seconds / each)
        self._uncomputed -= done
        share = done * each / TICK_S * self._token_s
        self._prompt_share += PROMPT_WEIGHT * (share - self._prompt_share)
        return done, TICK_S / seconds

    def _decode(self, done: Array, decode_tokens: Array) -> None:
        left = -np.expm1(-self._pace * decode_tokens[:, None, None]) * self._decoding
        self._decoding -= left
        self._decoding[:, :, 1:] += left[:, :, :-1]
        self._decoding[:, :, 0] += done[:, None] / self._decoding.shape[1]
        self.num = self._decoding.sum(axis=(1, 2))


def _own_s(table: StepTable, mix: RequestMix, num_levels: int) -> Array:
    """Seconds of each prompt alone, by level and by share of the decodes that may run."""
    num = np.linspace(0.0, table.max_seqs, _NUM_SHARES)[None, :, None]
    level = np.arange(num_levels)[:, None, None]
    prompts = mix.prompt_tokens[None, None, :]
    budget = np.maximum(1.0, table.max_tokens - num)
    levels, nums, last = np.broadcast_arrays(level, num, np.minimum(prompts, budget))
    result: Array = table.seconds(levels, nums, last) * np.maximum(1.0, prompts / budget)
    return result


def _p99_s(
    capacity: Capacity,
    base_rate: float,
    window_s: float,
    arrived: Array,
    started: Array,
    num: Array,
    level: npt.NDArray[np.int64],
) -> float:
    """Over all who arrive in the window, and over prompt lengths."""
    times_s: Array = np.arange(len(arrived), dtype=np.float64) * TICK_S
    total = float(np.interp(window_s, times_s, arrived))
    before = base_rate * BEFORE_S
    who = (np.arange(_SAMPLES) + 0.5) / _SAMPLES * (before + total) - before
    came_s = np.interp(np.maximum(who, 0.0), arrived, times_s)
    start_s = np.interp(np.maximum(who, 0.0), started, times_s)
    waits_s = np.where(who > 0, np.maximum(0.0, start_s - came_s), 0.0)
    at = np.minimum((start_s / TICK_S).astype(np.int64), len(num) - 1)
    at = np.where(who > 0, at, 0)
    own_s = capacity.own_s[level[at], capacity.share_of(num[at])]
    return float(np.percentile(waits_s[:, None] + own_s, 99))
