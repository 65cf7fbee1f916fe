"""How fast KV can be copied between a device and the host."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np

from kunserve.core.errors import ConfigError
from kunserve.engine.memory.copy_rate import COPY_BYTES, fastest_rate
from kunserve_extras.torch_body.cuda.cards import library_of
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.host_kv import Copy, HostCopies, PinnedPool
from kunserve_extras.torch_body.cuda.pages import DevicePages


def measure_copy_rate(device: str) -> float:
    """See ``engine.memory.copy_rate``. The slower way counts.

    A GPU is entered by a process that ends at once, because whoever enters one takes hundreds of
    MiB of it. Raises ConfigError where the driver refuses.
    """
    library = library_of(device)
    assert library is not None, device
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(rate_of, library).result()
        except (OSError, BrokenProcessPool) as error:
            raise ConfigError(f"cannot time copies of {device}: {error}") from error


def rate_of(library: str) -> float:
    """Of the first device, as an instance copies there."""
    driver = Driver(library=library)
    step = driver.granularity_bytes()
    pages = DevicePages(driver, -(-COPY_BYTES // step) * step, step)
    address = pages.reserve(pages.num_granules * step)
    pages.map(address, np.arange(pages.num_granules, dtype=np.int32))
    try:
        slower = _pinned_rate(driver, address)
    except OSError:  # so instances are refused it, too
        host, spans = np.ones(COPY_BYTES, np.uint8), [(address, COPY_BYTES)]
        ways = (lambda: pages.write(spans, host), lambda: pages.read(spans, host))
        slower = min(fastest_rate(copy) for copy in ways)
    pages.close()
    driver.close()
    return slower


def _pinned_rate(driver: Driver, address: int) -> float:
    """Raises OSError where no memory can be pinned."""
    pool = PinnedPool(driver, COPY_BYTES, COPY_BYTES)
    copies, some = HostCopies(driver), pool.copies(pool.take(1), address)

    def copy(out: Sequence[Copy], back: Sequence[Copy]) -> None:
        copies.begin(out, back)
        copies.wait()

    slower = min(fastest_rate(partial(copy, *ways)) for ways in (((), some), (some, ())))
    copies.close()
    pool.close()
    return slower
