"""How fast KV can be copied between an instance's memory and other memory of this machine."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from kunserve.core.errors import ConfigError
from kunserve.engine.torch.cuda.cards import library_of
from kunserve.engine.torch.cuda.driver import Driver
from kunserve.engine.torch.cuda.pages import DevicePages

COPY_BYTES = 32 << 20
"""Of one copy: beyond the processor's caches."""
NUM_COPIES = 4


def measure_copy_rate(device: str = "cpu") -> float:
    """Bytes per second of the fastest of a few copies; some 20 ms on a CPU.

    A GPU is entered by a process that ends at once, because whoever enters one takes hundreds of
    MiB of it. The slower way counts. Raises ConfigError where the driver refuses.
    """
    library = library_of(device)
    if library is None:
        source = np.ones(COPY_BYTES, np.uint8)
        target = np.empty_like(source)
        return _rate(lambda: np.copyto(target, source))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(_device_copy_rate, library).result()
        except (OSError, BrokenProcessPool) as error:
            raise ConfigError(f"cannot time copies of {device}: {error}") from error


def _device_copy_rate(library: str) -> float:
    """The same of the first device, as an instance copies there."""
    driver = Driver(library=library)
    step = driver.granularity_bytes()
    pages = DevicePages(driver, -(-COPY_BYTES // step) * step, step)
    address = pages.reserve(pages.num_granules * step)
    pages.map(address, np.arange(pages.num_granules, dtype=np.int32))
    host, spans = np.ones(COPY_BYTES, np.uint8), [(address, COPY_BYTES)]
    ways = (lambda: pages.write(spans, host), lambda: pages.read(spans, host))
    slower = min(_rate(copy) for copy in ways)
    pages.close()
    driver.close()
    return slower


def _rate(copy: Callable[[], None]) -> float:
    return COPY_BYTES / min(_copy_s(copy) for _ in range(NUM_COPIES))


def _copy_s(copy: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    copy()
    return time.perf_counter() - began_s
