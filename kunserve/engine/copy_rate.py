"""How fast KV can be copied to other memory of this machine."""

import time

import numpy as np

COPY_BYTES = 32 << 20
"""Of one copy: beyond the processor's caches."""
NUM_COPIES = 4


def measure_copy_rate() -> float:
    """Bytes per second of the fastest of a few copies; some 20 ms."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    best_s = min(_copy_s(source, target) for _ in range(NUM_COPIES))
    return COPY_BYTES / best_s


def _copy_s(source: np.ndarray, target: np.ndarray) -> float:
    began_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began_s
