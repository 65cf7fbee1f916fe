"""Cutting and scaling a workload. Each function is pure, and adds to the provenance."""

from dataclasses import replace

import numpy as np

from kunserve.core.errors import ConfigError
from kunserve_lab.workload import seeds
from kunserve_lab.workload.workload import Lengths, Workload


def window(workload: Workload, start_s: float = 0.0, end_s: float | None = None) -> Workload:
    """The requests with ``start_s <= arrival < end_s``, re-based so that ``start_s`` is 0."""
    if start_s == 0.0 and end_s is None:
        return workload
    last_s = float("inf") if end_s is None else end_s
    if not 0.0 <= start_s < last_s:
        raise ConfigError(
            f"a window must start at 0 or later and end after that: {start_s}, {end_s}"
        )
    keep = [index for index, moment in enumerate(workload.arrival_s) if start_s <= moment < last_s]
    if not keep:
        raise ConfigError(
            f"no request arrives between {start_s:g} s and {last_s:g} s: the workload has "
            f"{len(workload)} requests over {workload.duration_s:g} s ({workload.arrivals_source})"
        )
    picked = _pick(workload, keep)
    until = "end" if end_s is None else f"{end_s:g} s"
    return replace(
        picked,
        arrival_s=tuple(moment - start_s for moment in picked.arrival_s),
        arrivals_source=f"{workload.arrivals_source}, window {start_s:g} s to {until}",
    )


def first(workload: Workload, count: int) -> Workload:
    """The first ``count`` requests, or all of them when there are fewer."""
    if count < 1:
        raise ConfigError(f"a workload must have at least 1 request, not {count}")
    if count >= len(workload):
        return workload
    return replace(
        _pick(workload, list(range(count))),
        arrivals_source=f"{workload.arrivals_source}, first {count} requests",
    )


def scale_time(workload: Workload, factor: float) -> Workload:
    """Every arrival time times ``factor``: 0.1 plays the trace ten times as fast."""
    if not (factor > 0 and np.isfinite(factor)):
        raise ConfigError(f"a time factor must be greater than 0 and finite, not {factor}")
    if factor == 1.0:
        return workload
    return replace(
        workload,
        arrival_s=tuple(moment * factor for moment in workload.arrival_s),
        arrivals_source=f"{workload.arrivals_source}, time x{factor:g}",
    )


def thin(workload: Workload, fraction: float, seed: int) -> Workload:
    """Each request is kept, with its lengths, with probability ``fraction``.

    Lowers the rate and keeps the temporal pattern. Thinning with the same seed is nested: what
    a smaller fraction keeps, a larger one keeps too.
    """
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"a fraction to keep must be above 0 and at most 1, not {fraction}")
    if fraction == 1.0:
        return workload
    draws = seeds.generator(seed, seeds.THINNING).random(len(workload))
    keep = np.flatnonzero(draws < fraction).tolist()
    return replace(
        _pick(workload, keep),
        arrivals_source=f"{workload.arrivals_source}, thinned to {fraction:.3g} with seed {seed}",
    )


def upscale(
    workload: Workload, factor: float, seed: int, num_requests: int | None = None
) -> Workload:
    """TraceUpscaler: ``factor`` times the rate, with the temporal pattern kept.

    Each arrival is emitted ``floor(factor)`` times, plus once more with probability
    ``frac(factor)``. It stops at the original number of requests (or at ``num_requests``), and
    the lengths are attached again in their order, starting over if they run out. So with the
    default count a factor above 1 covers only the beginning of the trace.
    """
    if not (factor > 0 and np.isfinite(factor)):
        raise ConfigError(f"a rate factor must be greater than 0 and finite, not {factor}")
    if factor == 1.0 and num_requests is None:
        return workload
    whole = int(factor)
    draws = seeds.generator(seed, seeds.UPSCALING).random(len(workload))
    limit = len(workload) if num_requests is None else num_requests
    arrivals: list[float] = []
    for moment, draw in zip(workload.arrival_s, draws.tolist(), strict=True):
        if len(arrivals) >= limit:
            break
        arrivals.extend([moment] * (whole + (draw < factor - whole)))
    kept = tuple(arrivals[:limit])
    return Workload(
        kept,
        workload.lengths.take(len(kept)),
        f"{workload.arrivals_source}, TraceUpscaler x{factor:g} with seed {seed}",
    )


def upscale_whole(workload: Workload, factor: float, seed: int) -> Workload:
    """`upscale` over the trace's whole duration: about ``factor`` times as many requests."""
    return upscale(workload, factor, seed, num_requests=int(factor + 1) * len(workload))


def with_lengths(workload: Workload, lengths: Lengths) -> Workload:
    """The same arrivals with other lengths, in order, starting over if they run out."""
    return replace(workload, lengths=lengths.take(len(workload)))


def _pick(workload: Workload, keep: list[int]) -> Workload:
    lengths = workload.lengths
    return replace(
        workload,
        arrival_s=tuple(workload.arrival_s[index] for index in keep),
        lengths=replace(
            lengths,
            input_tokens=tuple(lengths.input_tokens[index] for index in keep),
            output_tokens=tuple(lengths.output_tokens[index] for index in keep),
            contents=None
            if lengths.contents is None
            else tuple(lengths.contents[index] for index in keep),
            priorities=lengths.priorities and tuple(lengths.priorities[index] for index in keep),
        ),
    )
