"""A bursty workload that needs no file: two overload spikes on Gamma arrivals.

It stands in for the 640 s window of BurstGPT of the paper's restoration experiment, which has
two overload events. The place, length and height of the spikes are those of the public Azure
2023 conversation and code services seen on one clock (a 3.5x spike of 45 s, then a 4.5x spike of
65 s); the lengths are a fit to BurstGPT's published means. It is synthetic, and says so.
"""

from dataclasses import dataclass, replace

import numpy as np

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.arrivals import modulated_arrivals
from kunserve_lab.workload.lengths import burstgpt_lengths
from kunserve_lab.workload.workload import Lengths, Workload


@dataclass(frozen=True, slots=True)
class Spike:
    """A span in which the rate is ``factor`` times the base rate; times as part of the window."""

    start: float
    end: float
    factor: float


WINDOW_S = 640.0
SPIKES = (
    Spike(45 / WINDOW_S, 90 / WINDOW_S, 3.5),
    Spike(415 / WINDOW_S, 480 / WINDOW_S, 4.5),
)
BURSTINESS = 0.5
"""Default Gamma shape: gaps with a coefficient of variation of 1.4, burstier than Poisson."""


def burst_arrivals(
    base_rate: float, burst_rate: float, before_s: float, length_s: float, after_s: float, seed: int
) -> tuple[float, ...]:
    """Poisson arrivals at one rate, and between ``before_s`` and ``length_s`` later at another."""
    edges_s = np.cumsum([0.0, before_s, length_s, after_s])
    return modulated_arrivals(edges_s, np.array([base_rate, burst_rate, base_rate]), 1.0, seed)


def peak_over_mean(spikes: tuple[Spike, ...] = SPIKES) -> float:
    """Highest rate over mean rate of the window."""
    return max((spike.factor for spike in spikes), default=1.0) * _base_share(spikes)


def bursty_arrivals(
    duration_s: float,
    mean_rate: float,
    seed: int,
    burstiness: float = BURSTINESS,
    spikes: tuple[Spike, ...] = SPIKES,
) -> tuple[float, ...]:
    """Arrivals over ``duration_s`` whose mean rate over the window is ``mean_rate``.

    The spikes keep their place and share of the window, so a shorter window has shorter spikes
    of the same height.
    """
    if not (duration_s > 0 and np.isfinite(duration_s)):
        raise ConfigError(f"a window's duration must be positive and finite, not {duration_s} s")
    if not (mean_rate > 0 and np.isfinite(mean_rate)):
        raise ConfigError(
            "the bursty workload needs a finite request rate greater than 0 (its mean rate over "
            f"the window), not {mean_rate}"
        )
    base_rate = mean_rate * _base_share(spikes)
    edges, rates = [0.0], []
    for spike in spikes:
        assert edges[-1] <= spike.start * duration_s and spike.start < spike.end <= 1, spikes
        edges += [spike.start * duration_s, spike.end * duration_s]
        rates += [base_rate, base_rate * spike.factor]
    edges.append(duration_s)
    rates.append(base_rate)
    return modulated_arrivals(np.array(edges), np.array(rates), burstiness, seed)


def bursty_workload(
    duration_s: float,
    mean_rate: float,
    seed: int,
    burstiness: float = BURSTINESS,
    lengths: Lengths | None = None,
    spikes: tuple[Spike, ...] = SPIKES,
) -> Workload:
    """The built-in bursty workload; ``lengths`` replaces the fit to BurstGPT's lengths."""
    arrival_s = bursty_arrivals(duration_s, mean_rate, seed, burstiness, spikes)
    drawn = burstgpt_lengths(len(arrival_s), seed) if lengths is None else lengths
    heights = " and ".join(f"{spike.factor:g}x" for spike in spikes)
    source = (
        f"synthetic, two spikes of {heights} the base rate in {duration_s:g} s, "
        f"mean {mean_rate:g} req/s, Gamma gaps (burstiness {burstiness:g}), seed {seed}"
    )
    return Workload(arrival_s, drawn.take(len(arrival_s)), source)


def spikes_of(factor: float) -> tuple[Spike, ...]:
    """`SPIKES` at their places, each ``factor`` times the base rate high."""
    if not (factor >= 1 and np.isfinite(factor)):
        raise ConfigError(f"a spike is at least 1 times the base rate, not {factor}")
    return tuple(replace(spike, factor=factor) for spike in SPIKES)


def _base_share(spikes: tuple[Spike, ...]) -> float:
    """Base rate over mean rate."""
    return 1.0 / (1.0 + sum((spike.factor - 1) * (spike.end - spike.start) for spike in spikes))
