"""The burst of a workload: the span in which most comes beyond what can be sustained."""

from dataclasses import dataclass

import numpy as np

from kunserve_lab.workload.workload import Workload

BEFORE_S = 45.0
"""Of time before a burst, whose rate is its base."""


@dataclass(frozen=True, slots=True)
class Burst:
    """A span of a workload. Rates are requests per second; a request counts by its weight."""

    start_s: float
    length_s: float
    rate: float
    base_rate: float
    """Mean over the ``BEFORE_S`` before it; over all else where there is less before it."""


def find_burst(workload: Workload, sustained_rate: float) -> Burst | None:
    """The span from one arrival to another whose excess over ``sustained_rate`` is greatest.

    A request weighs what it asks of memory against the mean: its KV times how long it decodes. So
    a burst of long requests is one too. None if there are fewer than two moments of arrival.
    """
    times = np.array(workload.arrival_s)
    if len(times) < 2 or times[0] == times[-1]:
        return None
    inputs = np.array(workload.input_tokens, dtype=np.float64)
    outputs = np.array(workload.output_tokens, dtype=np.float64)
    asked = outputs * (inputs + outputs / 2)
    reached = np.concatenate(([0.0], np.cumsum(asked / asked.mean())))
    before = reached[:-1] - sustained_rate * times
    after = reached[1:] - sustained_rate * times
    lowest = np.minimum.accumulate(before)
    last = int(np.argmax(after - lowest))
    first = int(np.argmin(before[: last + 1]))
    start_s = float(times[first])
    length_s = max(float(times[last]) - start_s, 1.0 / sustained_rate)
    amount = float(reached[last + 1] - reached[first])
    early = int(np.searchsorted(times, start_s - BEFORE_S))
    if start_s - times[0] >= BEFORE_S:
        base_rate = float(reached[first] - reached[early]) / BEFORE_S
    else:
        rest_s = float(times[-1] - times[0]) - length_s
        base_rate = max(0.0, float(reached[-1]) - amount) / rest_s if rest_s > 0 else 0.0
    return Burst(start_s, length_s, amount / length_s, base_rate)
