"""Where a scenario's traffic lies between too little and too much, and what a drop can do for it.

The fluid model (`sim.fluid`) is asked about one burst, the one with the greatest excess over what
the cluster sustains. That takes milliseconds. The text says how far to trust it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.sim.fluid import Bursts, Capacity, Flow, capacity_of, flow
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.sim.steady import Array, mix_of
from kunserve_lab.workload.burst import Burst, find_burst

HELPS = 1.5
"""Times lower that P99 TTFT must be for the model to say that something helps."""
DOUBT = 0.1
"""How much lower and higher the burst is taken to be as well, because one run is one draw."""
MOST_OF_IT = 0.8
"""Of what endless memory would take off P99 TTFT, what drops must, for the burst to fit."""
AGREED, SIMULATED = 99, 108
"""Of so many simulated bursts, at how many the model said as the simulator whether P99 TTFT falls
by `HELPS`: `python -m benchmarks.paper.map_agreement`."""


class Kind(enum.Enum):
    """What to expect of drops, in words."""

    NO_PARTNER = "one instance has no partner to drop layers with"
    ROOM = "memory never fills"
    EDGE = "memory nearly fills: with a little more traffic drops help"
    SEATS = "--max-num-seqs is reached before memory is full: raise it"
    COMPUTE = "compute binds first: even endless memory would hardly help"
    RIDGE = "the burst overflows memory, and fits after a drop"
    OUTLASTS = "drops help, but the burst outlasts the memory that they free"
    TOO_MUCH = (
        "the burst does not fit even after a drop: consider more instances or shorter answers"
    )


@dataclass(frozen=True, slots=True)
class Projection:
    """What the model expects of one burst."""

    burst: Burst
    height: float
    """In X, as is the next."""
    base: float
    by_drop: float
    """Times lower that drops make P99 TTFT; the next is of endless memory."""
    by_endless: float
    doubt: tuple[float, float]
    """Least and most of `by_drop` where the burst is `DOUBT` lower or higher."""
    kind: Kind


def capacity(scenario: Scenario) -> Capacity:
    """What an instance of the scenario can do for its mix of lengths."""
    return capacity_of(
        scenario.profile,
        mix_of(scenario.workload.lengths),
        num_instances=scenario.num_instances,
        max_tokens=scenario.scheduler.max_num_batched_tokens,
        max_seqs=scenario.scheduler.max_num_seqs,
    )


def outlook(scenario: Scenario, able: Capacity) -> Projection | None:
    """Of the scenario's greatest burst; None where too little arrives to have one."""
    full_rate = able.full_rate * scenario.num_instances
    burst = find_burst(scenario.workload, full_rate)
    return None if burst is None else expect(able, burst, full_rate)


def expect(able: Capacity, burst: Burst, full_rate: float) -> Projection:
    """What to expect of this burst in a cluster that sustains ``full_rate``."""
    height, base = burst.rate / full_rate, burst.base_rate / full_rate
    heights = height * np.array([1 - DOUBT, 1.0, 1 + DOUBT])
    bursts = Bursts(heights, np.full(3, burst.length_s), np.full(3, base))
    alone = flow(able, bursts, drops=False)
    dropped = flow(able, bursts, drops=True)
    endless = flow(able, bursts, drops=False, endless=True)
    by_drop, by_endless = alone.p99_s / dropped.p99_s, alone.p99_s / endless.p99_s
    return Projection(
        burst=burst,
        height=height,
        base=base,
        by_drop=float(by_drop[1]),
        by_endless=float(by_endless[1]),
        doubt=(float(by_drop.min()), float(by_drop.max())),
        kind=_kind(able, alone, by_drop, by_endless),
    )


def _kind(able: Capacity, alone: Flow, by_drop: Array, by_endless: Array) -> Kind:
    """Of the burst in the middle; those beside it tell whether it is at an edge."""
    if len(able.pools_tokens) == 1:
        return Kind.NO_PARTNER
    if by_drop[1] >= HELPS:
        removed = (1 - 1 / by_drop[1]) / (1 - 1 / by_endless[1])
        return Kind.RIDGE if removed >= MOST_OF_IT else Kind.OUTLASTS
    if by_drop[2] >= HELPS:
        return Kind.EDGE
    if not alone.waits_for_memory[1]:
        if alone.waits_for_seats[1]:
            return Kind.SEATS
        return Kind.COMPUTE if alone.waits_for_compute[1] else Kind.ROOM
    return Kind.TOO_MUCH if by_endless[1] >= HELPS else Kind.COMPUTE


def outlook_lines(scenarios: Mapping[float, Scenario]) -> list[str]:
    """For people: where the traffic of each load lies; no line where there is none."""
    if not scenarios:
        return []
    able = capacity(next(iter(scenarios.values())))
    num = next(iter(scenarios.values())).num_instances
    found = {load: outlook(scenario, able) for load, scenario in scenarios.items()}
    known = {load: one for load, one in found.items() if one is not None}
    if not known:
        return []
    first = next(iter(scenarios.values())).profile
    # The rule is of bursts that fill the memory.
    fills = [one for one in known.values() if one.kind is not Kind.ROOM]
    base = fills[0].base if fills else None
    lines = ["Where this traffic lies, by a fluid model (kunserve simulate --map draws it):"]
    lines += [f"  {line}" for line in capacity_lines(first, able, num, base)]
    for load, one in known.items():
        at = f"Load {load:g}: " if len(known) > 1 else ""
        lines.append(f"  {at}{_told(one)}")
    return [*lines, f"  {trust()}"] if fills else lines


def capacity_lines(
    profile: InstanceProfile, able: Capacity, num_instances: int, base: float | None
) -> list[str]:
    """What the cluster can do, and the rule for bursts after a ``base`` rate, if there are some."""
    rate = able.full_rate * num_instances
    limit = "with --max-num-seqs running" if able.seats_bind else "when its memory is full"
    lines = [
        f"Weights take {profile.weight_share:.0%} of an instance's memory; drops add "
        f"{able.gain:.0%} to its KV memory.",
        f"The cluster sustains {rate:.3g} requests/s {limit} (X); a request then decodes "
        f"for {able.residence_s:.0f} s. Above {able.compute_rate / able.full_rate:.1f} X prompts "
        "alone take all compute.",
    ]
    if base is not None:
        lines.append(
            f"Drops remove at most {able.removable_s:.0f} s of queueing, what fits into their "
            f"memory. The P99 prompt alone takes {able.floor_s(base):.2g} s, so P99 TTFT falls at "
            f"most {able.most_gain(base):.1f}x."
        )
    return lines


def trust() -> str:
    """How far to trust the model."""
    return (
        f"Trust: on whether P99 TTFT falls {HELPS:g}x or more, model and simulator agreed at "
        f"{AGREED} of {SIMULATED} bursts."
    )


def _told(one: Projection) -> str:
    """The burst, and what to expect of it."""
    if one.kind is Kind.ROOM:
        return f"No burst matters: {one.kind.value}."
    burst, (low, high) = one.burst, one.doubt
    return (
        f"Its greatest burst, {burst.length_s:.0f} s at {one.height:.2f} X from second "
        f"{burst.start_s:.0f} on, after {one.base:.2f} X: {one.kind.value}. P99 TTFT is "
        f"{one.by_drop:.1f}x lower with drops ({low:.1f}-{high:.1f}x if it were {DOUBT:.0%} lower "
        f"or higher), {one.by_endless:.1f}x with endless memory."
    )
