"""What a server takes is known once its first instances are ready, and holds for later ones."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.cluster.api import limits_of
from kunserve.cluster.processes.orders import InstanceOrders
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Ready
from kunserve.core.transfer import PeerAddress
from kunserve_lab.world.fake_body import fake_spec


def ready(blocks: int, max_model_len: int) -> Ready:
    spec = fake_spec(InstanceId(0), 4, blocks * 4, 2)
    return Ready(spec, PeerAddress("links", "bulk"), max_model_len, "fake")


@pytest.mark.parametrize(
    ("blocks", "max_model_len", "own"),
    [(80, 160, None), (99, 200, None), (20, 160, 40), (80, 7, 7)],
)
def test_whoever_comes_later_must_hold_what_is_taken(
    blocks: int, max_model_len: int, own: int | None
) -> None:
    limits = limits_of((ready(80, 999), ready(99, 160)), 1000)
    assert limits.max_model_len == 160
    lack = limits.shortfall(ready(blocks, max_model_len))
    if own is None:
        assert lack is None
    else:
        assert lack is not None
        assert lack.startswith(
            f"it has room for requests of {own} tokens, but this server takes 160:"
        )


def test_a_later_front_takes_no_more_than_the_one_before_it() -> None:
    noted: list[int] = []
    left = SimpleNamespace(max_model_len=40)
    left.note = lambda *_: noted.append(left.max_model_len)
    orders = object.__new__(InstanceOrders)
    orders._succession, orders._wires = left, None  # type: ignore[assignment]
    processes: Any = SimpleNamespace(ids=(), marks={}, loaded=())
    limits = limits_of((ready(80, 999),), 1000)
    settled = orders.settled(limits, processes)
    assert settled == replace(limits, max_model_len=40)
    assert settled.shortfall(ready(20, 999)) is None, "it was let in before"
    for earlier in (None, 400):
        left.max_model_len = earlier
        assert orders.settled(limits, processes) == limits
    assert noted == [40, 160, 160], "the next front knows"
