"""Shared by every test: Hypothesis' settings, the ``gpu`` marker, waiting without sleeping."""

import signal
import time
from collections.abc import Callable, Generator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import COMMIT, HUNT
from tests.running import changed, forks
from tests.running.changed import pytest_configure, pytest_ignore_collect
from tests.running.forks import pytest_collection, pytest_runtestloop

__all__ = [
    "pytest_collection",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_runtestloop",
]

T = TypeVar("T")
PATIENCE_S = 60.0
"""How long a test waits for what comes at once on an idle machine."""

# No deadline: a busy two-core machine must not turn a slow example into a failure. The same
# examples every time, so that a commit is judged by what it changed; `make hunt` draws new ones,
# and five times as many.
settings.register_profile(
    "kunserve",
    max_examples=COMMIT,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=True,
)
settings.register_profile(
    "hunt", settings.get_profile("kunserve"), max_examples=HUNT, derandomize=False
)
settings.load_profile("kunserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    changed.pytest_addoption(parser)
    forks.pytest_addoption(parser)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def wait_until(probe: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Call ``probe`` until it gives something true, and return that; fail after ``timeout_s``."""
    begin = time.monotonic()
    while True:
        value = probe()
        if value:
            return value
        now = time.monotonic()
        assert now < begin + timeout_s, f"still {value!r} after {timeout_s} s"
        # What takes long is asked for less often: probes take time from those they wait for.
        time.sleep(min(0.03, max(0.001, (now - begin) / 20)))


@pytest.fixture
def interruptible() -> Generator[None, None, None]:
    """SIGINT interrupts, also if a shell that runs pytest in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def eventually() -> Callable[..., object]:
    """``eventually(probe, timeout_s=60)``: polling with a deadline, for other threads' doings."""
    return wait_until
