"""Fake instances on two hosts: everything but the model is real, the network too."""

from collections.abc import Callable

from benchmarks.hosts import Hosts
from tests.hosts.front import FrontOnHost, Orders


def orders(hosts: Hosts, names: str, front: str = "a", **more: object) -> Orders:
    """Instances on these hosts, a letter each."""
    places = [(hosts[name].pid, hosts[name].address) for name in names]
    return Orders(hosts[front].address, places, **more)  # type: ignore[arg-type]


def test_a_pipeline_over_two_hosts_gives_the_same_tokens(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts("a", "b")
    with FrontOnHost(hosts["a"], orders(hosts, "ab")) as front:
        front.ask("submit before 1 40 60")
        expected = front.ask("result before")
        front.ask("submit through 1 40 60")
        front.ask("flow through 5")
        assert "groups=1+1->2" in front.ask("drop")
        assert front.ask("result through") == expected
        state = front.ask("state")
        assert state["groups"] == [[0, 1]] or state["groups"] == [[1, 0]]
        assert state["errors"] == 0 and state["deaths"] == 0
