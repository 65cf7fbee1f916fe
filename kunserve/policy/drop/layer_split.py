"""Which layers each member of a merged group keeps (paper section 4.1, requirement 2).

A merged group must hold every layer once, and no parameter may move: each member's new range
lies within what it already holds. Among all such splits the pipeline wants the shortest longest
stage (throughput is that of the slowest stage), and memory wants the largest
``min over stages of units // layers``.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec

Prefer: TypeAlias = Literal["balance", "capacity"]


EXACT_MEMBERS = 8
"""Members of unequal memory beyond which the second and third aims are met only nearly."""


class Member(NamedTuple):
    """An instance that joins a group, and the layers whose weights it has in memory."""

    instance_id: InstanceId
    held: LayerRange
    spec: InstanceSpec


class _Task(NamedTuple):
    """What every search over orders and cuts has in common."""

    num_layers: int
    period: int
    """Layers between which no stage ends."""
    windows: tuple[LayerRange, ...]
    """What each member holds."""
    before: tuple[int, ...]
    """Bit set of the members that stand before each member in some best order."""


class _Limits(NamedTuple):
    """The most layers that each member may get."""

    inner: tuple[int, ...]
    last: tuple[int, ...]
    """If it is the last stage, which computes the output head as well."""


_Cut: TypeAlias = tuple[tuple[int, LayerRange], ...]
"""(member's index, its layers) in stage order."""


def split_layers(
    members: Sequence[Member],
    num_layers: int,
    *,
    prefer: Prefer = "balance",
    head_cost_layers: int = 0,
) -> tuple[Stage, ...] | None:
    """Give every member a non-empty range within what it holds; None if no order allows it.

    Chosen lexicographically, and exactly (see ``EXACT_MEMBERS``):

    1. ``cost = max over stages of layers (+ head_cost_layers on the last)`` is least;
    2. ``capacity = min over stages of blocks_when_holding(layers)`` is greatest;
    3. the sum of squared layer counts is least (the evenest of the rest).

    ``prefer="capacity"`` swaps 1 and 2, for members of very different memory.

    ``{A:0-24, B:24-48} + {C:0-48}`` gives ``A:0-16, C:16-32, B:32-48``.

    Where KV of layers with a window is a ring, stages end at the ends of its periods only.
    """
    if not members or len(members) > num_layers:
        return None
    period = members[0].spec.blocks.period
    is_last_alike = head_cost_layers == 0 and num_layers % period == 0
    before = _precedence(members, is_last_alike)
    task = _Task(num_layers, period, tuple(m.held for m in members), before)

    def limits(cost: int, capacity: int) -> _Limits:
        inner = tuple(_most_layers(m.spec, capacity, num_layers) for m in members)
        return _Limits(
            tuple(min(limit, cost) for limit in inner),
            tuple(min(limit, cost - head_cost_layers) for limit in inner),
        )

    def feasible(cost: int, capacity: int) -> bool:
        return _best_cut(task, limits(cost, capacity)) is not None

    worst_cost = num_layers + head_cost_layers
    capacity = 0
    if prefer == "capacity":
        capacity = _greatest_capacity(members, num_layers, partial(feasible, worst_cost))
    cost = _least_cost(len(members), worst_cost, lambda c: feasible(c, capacity))
    if cost is None:
        return None
    if prefer == "balance":
        capacity = _greatest_capacity(members, min(cost, num_layers), partial(feasible, cost))
    cut = _best_cut(task, limits(cost, capacity))
    assert cut is not None, (members, cost, capacity)
    return tuple(Stage(members[index].instance_id, layers) for index, layers in cut)


def _precedence(members: Sequence[Member], is_last_alike: bool) -> tuple[int, ...]:
    """Which members may be taken to stand before which.

    i before j if i's window ends before j's starts: nothing else is possible. Nothing is lost
    either if both have the same memory and i's window starts and ends no later than j's: wherever
    j stands before i, the two can change places, cuts unchanged, and still lie in their windows.
    And if all windows are equal, any order will do, unless the last stage differs. So the stages of
    one old group keep their order, and merging groups of m and n stages visits at most
    (m + 1) x (n + 1) sets of placed members rather than 2 ** (m + n).

    Beyond ``EXACT_MEMBERS`` the rule for equal memory is used for unequal memory too.
    """
    alike = len(members) > EXACT_MEMBERS or (
        is_last_alike and all(m.held == members[0].held for m in members)
    )
    before = [0] * len(members)
    for i, one in enumerate(members):
        for j, other in enumerate(members):
            a, b = one.held, other.held
            if i == j or a.first > b.first or a.end > b.end or (a == b and i > j):
                continue
            if a.end <= b.first or alike or _same_memory(one.spec, other.spec):
                before[j] |= 1 << i
    return tuple(before)


def _same_memory(a: InstanceSpec, b: InstanceSpec) -> bool:
    return (
        a.kv_units == b.kv_units
        and a.layer_bytes == b.layer_bytes
        and a.unit_bytes == b.unit_bytes
        and a.granule_bytes == b.granule_bytes
    )


def _most_layers(spec: InstanceSpec, capacity: int, num_layers: int) -> int:
    """The most layers an instance can hold with room for ``capacity`` blocks; may be 0.

    ``blocks_when_holding`` falls as layers rise, so a bisection finds it.
    """
    if capacity <= 0:
        return num_layers
    counts = range(1, num_layers + 1)
    return bisect_right(counts, -capacity, key=lambda h: -spec.blocks_when_holding(h))


def _least_cost(num_members: int, worst_cost: int, feasible: Callable[[int], bool]) -> int | None:
    """The least feasible cost. The stages' costs sum to ``worst_cost``: none beats the even share.

    Nearly always the even share is feasible, so it is tried before bisecting.
    """
    even = -(-worst_cost // num_members)
    if feasible(even):
        return even
    costs = range(even + 1, worst_cost + 1)
    index = bisect_left(costs, True, key=feasible)
    return costs[index] if index < len(costs) else None


def _greatest_capacity(
    members: Sequence[Member], most_layers: int, feasible: Callable[[int], bool]
) -> int:
    """The greatest feasible capacity: some member's at some number of layers, or 0."""
    specs = {
        (m.spec.kv_units, m.spec.layer_bytes, m.spec.unit_bytes, m.spec.granule_bytes): m.spec
        for m in members
    }
    num_layers = members[0].spec.num_layers
    least_layers = max(1, num_layers - (len(members) - 1) * most_layers)
    candidates = sorted(
        {
            spec.blocks_when_holding(h)
            for spec in specs.values()
            for h in range(least_layers, most_layers + 1)
        }
    )
    index = bisect_left(candidates, True, key=lambda blocks: not feasible(blocks))
    return candidates[index - 1] if index > 0 else 0


def _best_cut(task: _Task, limits: _Limits) -> _Cut | None:
    """The evenest split under the limits, or None.

    Dynamic programming, one stage at a time, over (set of placed members, layers covered):
    the least sum of squares that reaches it, and how. States from which the remaining members
    could not cover the remaining layers are not kept, so that with tight limits a handful stay.
    """
    n, total = len(task.windows), task.num_layers
    if sum(limits.inner) < total:
        return None
    reached: list[dict[tuple[int, int], tuple[int, int, int]]] = [{(0, 0): (0, -1, -1)}]
    for depth in range(n):
        level: dict[tuple[int, int], tuple[int, int, int]] = {}
        for (placed, position), (squares, _, _) in reached[-1].items():
            for member, ends in _next_stages(task, limits, placed, position, n - depth):
                for end in ends:
                    key = (placed | 1 << member, end)
                    cost = squares + (end - position) ** 2
                    known = level.get(key)
                    if known is None or cost < known[0]:
                        level[key] = (cost, member, position)
        reached.append(level)
    full = (1 << n) - 1
    if (full, total) not in reached[n]:
        return None
    cut: list[tuple[int, LayerRange]] = []
    placed, end = full, total
    for depth in range(n, 0, -1):
        _, member, first = reached[depth][placed, end]
        cut.append((member, LayerRange(first, end)))
        placed, end = placed & ~(1 << member), first
    return tuple(reversed(cut))


def _next_stages(
    task: _Task, limits: _Limits, placed: int, position: int, num_left: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Members that may hold the stage starting at ``position``, and where it may end."""
    rest = sum(limit for i, limit in enumerate(limits.inner) if not placed >> i & 1)
    for member, window in enumerate(task.windows):
        if placed >> member & 1 or task.before[member] & ~placed or position < window.first:
            continue
        limit = limits.last[member] if num_left == 1 else limits.inner[member]
        others = rest - limits.inner[member]
        least_end = max(position + 1, task.num_layers - others)
        most_end = min(window.end, position + limit, task.num_layers - (num_left - 1))
        if least_end <= most_end:
            yield member, _ends(task, least_end, most_end)


def _ends(task: _Task, least: int, most: int) -> Sequence[int]:
    """Layers [least, most] at which a stage may end."""
    if task.period == 1:
        return range(least, most + 1)
    ends = list(range(-(-least // task.period) * task.period, most + 1, task.period))
    return ends if most < task.num_layers or most in ends else [*ends, most]
