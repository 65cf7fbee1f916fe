"""Arrival times of requests, in seconds from the start. Each function is pure and seeded."""

import numpy as np
import numpy.typing as npt

from kunserve.core.errors import ConfigError
from kunserve_lab.workload import seeds


def constant_arrivals(count: int, rate: float) -> tuple[float, ...]:
    """``count`` arrivals exactly ``1 / rate`` seconds apart, the first at 0."""
    _check_rate(rate)
    return tuple(index / rate for index in range(count))


def immediate_arrivals(count: int) -> tuple[float, ...]:
    """``count`` arrivals at time 0 (vLLM's ``--request-rate inf``)."""
    return (0.0,) * count


def gamma_arrivals(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """A renewal process with Gamma gaps of shape ``burstiness`` and mean ``1 / rate``.

    ``burstiness`` 1 is Poisson, less is burstier (squared coefficient of variation
    ``1 / burstiness``), infinite is `constant_arrivals`. As in vLLM, the gaps are rescaled so
    that the last request arrives at exactly ``count / rate``: the mean rate is what was asked.
    """
    _check_rate(rate)
    if burstiness == float("inf"):
        return constant_arrivals(count, rate)
    if count == 0:
        return ()
    moments = _unit_renewal(count, burstiness, seeds.generator(seed, seeds.ARRIVALS))
    return tuple((moments * (count / rate / moments[-1])).tolist())


def modulated_arrivals(
    times_s: npt.NDArray[np.float64],
    rates: npt.NDArray[np.float64],
    burstiness: float,
    seed: int,
) -> tuple[float, ...]:
    """Arrivals whose rate is ``rates[i]`` between ``times_s[i]`` and ``times_s[i + 1]``.

    A stationary Gamma renewal process of unit rate is mapped through the inverse of the
    cumulative rate. So the mean count over any span is what the rates say, whatever the
    burstiness. One draw may differ much, and may be empty: with few arrivals to expect, and
    bursty ones, it often is.
    """
    assert len(times_s) == len(rates) + 1, (len(times_s), len(rates))
    cumulative = np.concatenate(([0.0], np.cumsum(rates * np.diff(times_s))))
    total = float(cumulative[-1])
    rng = seeds.generator(seed, seeds.ARRIVALS)
    count = int(total + 10 * np.sqrt(total / min(burstiness, 1.0)) + 10)
    moments = _unit_renewal(count, burstiness, rng)
    moments = moments - moments[0] + _first_moment(burstiness, rng)
    while moments[-1] < total:
        more = _unit_renewal(count, burstiness, rng)
        moments = np.concatenate((moments, moments[-1] + more))
    inside = moments[moments < total]
    return tuple(np.interp(inside, cumulative, times_s).tolist())


def _unit_renewal(
    count: int, burstiness: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Moments of a renewal process of unit rate with Gamma gaps."""
    if not burstiness > 0:
        raise ConfigError(f"burstiness must be greater than 0, not {burstiness}")
    if np.isinf(burstiness):
        return np.arange(1, count + 1, dtype=np.float64)
    gaps = rng.gamma(shape=burstiness, scale=1.0 / burstiness, size=count)
    moments: npt.NDArray[np.float64] = np.cumsum(gaps)
    if moments[-1] <= 0.0:  # a tiny shape underflows to gaps of 0
        return np.arange(1, count + 1, dtype=np.float64)
    return moments


def _first_moment(burstiness: float, rng: np.random.Generator) -> float:
    """When the first arrival comes after a moment that knows nothing of the process.

    Such a moment falls into a gap with a chance in proportion to the gap's length, and anywhere
    in it. A gap drawn so has a Gamma distribution of one shape more.
    """
    if np.isinf(burstiness):
        return 1.0
    return float(rng.uniform() * rng.gamma(shape=burstiness + 1.0, scale=1.0 / burstiness))


def _check_rate(rate: float) -> None:
    if not (rate > 0 and np.isfinite(rate)):
        raise ConfigError(f"a request rate must be greater than 0 and finite, not {rate}")
