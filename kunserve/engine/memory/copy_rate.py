"""How fast KV can be copied between an instance's memory and other memory of this machine."""

import time
from collections.abc import Callable

import numpy as np

from kunserve.core.extras import find_extra

COPY_BYTES = 32 << 20
"""Of one copy: beyond the processor's caches."""
NUM_COPIES = 4


def measure_copy_rate(device: str = "cpu") -> float:
    """Bytes per second of the fastest of a few copies; some 20 ms on a CPU.

    Raises ConfigError where a device's driver refuses.
    """
    if device != "cpu":
        rate: float = find_extra("cards", "cuda", f"--device {device}").measure_copy_rate(device)
        return rate
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return fastest_rate(lambda: np.copyto(target, source))


def fastest_rate(copy: Callable[[], None]) -> float:
    """Of what copies ``COPY_BYTES``."""
    return COPY_BYTES / min(_copy_s(copy) for _ in range(NUM_COPIES))


def _copy_s(copy: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    copy()
    return time.perf_counter() - began_s
