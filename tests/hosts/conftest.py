"""Hosts for tests: skipped, with the reason, where they cannot be made."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks.links.hosts import Hosts, why_not


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """``make_hosts("a", "b", gbps=1.0)``: they are gone at the test's end."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(*names: str, gbps: float | None = None, delay_ms: float | None = None) -> Hosts:
            return stack.enter_context(Hosts(names, gbps, delay_ms))

        yield make
