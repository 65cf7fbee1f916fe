"""Fake instances on two hosts: everything but the model is real, the network too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.hosts import Hosts, places_on
from benchmarks.links.hosts_front import PATIENCE_S, FrontOnHost, Orders
from kunserve.cluster.processes.process_mark import mark_of
from tests.conftest import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


def orders(hosts: Hosts, names: str, front: str = "a", **more: object) -> Orders:
    """Instances on these hosts, a letter each."""
    return Orders(hosts[front].address, places_on(hosts, names), **more)  # type: ignore[arg-type]


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


def wait_for(front: FrontOnHost, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The front's state once it is as wanted."""

    def look() -> dict[str, Any] | None:
        state: dict[str, Any] = front.ask("state")
        return state if wanted(state) else None

    return wait_until(look, PATIENCE_S)  # type: ignore[return-value]


def is_there(pid: int) -> bool:
    return mark_of(pid) is not None


def test_a_host_that_is_cut_off_is_given_up_and_what_comes_back_is_refused(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts("f", "a", "b")
    places = orders(hosts, "aabb", "f", cluster={"heartbeat_timeout_s": 5.0})
    with FrontOnHost(hosts["f"], places) as front:
        front.ask("submit before 1 40 400")
        expected = front.ask("result before")
        old_pids = front.ask("state")["pids"][2:]
        for number in range(8):
            front.ask(f"submit r{number} 1 40 400")
        front.ask("drop")
        front.ask("flow r7 5")
        front.ask(f"unreachable {hosts['b'].address}")
        hosts.cut_off("b")
        wait_for(front, lambda state: state["deaths"] == 2)
        for number in range(8):
            assert front.ask(f"result r{number}") == expected
        assert all(map(is_there, old_pids)), "nobody could end them"
        hosts.rejoin("b")
        wait_until(lambda: not any(map(is_there, old_pids)), PATIENCE_S)
        state = wait_for(front, lambda state: not state["missing"])
        assert state["errors"] == 0 and state["deaths"] == 2
        assert len(state["groups"]) >= 3
        front.ask(f"reachable {hosts['b'].address}")


def test_members_that_do_not_reach_each_other_form_groups_that_do(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts("f", "a", "b")
    with FrontOnHost(hosts["f"], orders(hosts, "ab", "f")) as front:
        front.ask("submit before 1 40 500")
        expected = front.ask("result before")
        front.ask("submit through 1 40 500")
        front.ask("flow through 5")
        assert "groups=1+1->2" in front.ask("drop")
        hosts.cut("a", "b")  # one direction is enough
        wait_for(front, lambda state: len(state["groups"]) == 2)
        assert front.ask("result through") == expected
        assert "no connection to instances" in front.ask("drop")
        hosts.heal("a", "b")
        wait_until(lambda: "groups=1+1->2" in front.ask("drop"), PATIENCE_S)
        front.ask("submit again 1 40 500")
        assert front.ask("result again") == expected
        state = front.ask("state")
        assert state["errors"] == 0 and state["deaths"] == 0


def test_a_front_on_a_third_host_is_killed_and_comes_back(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts("f", "a", "b")
    places = orders(hosts, "ab", "f", run_folder=str(tmp_path / "run"))
    with FrontOnHost(hosts["f"], places) as front:
        front.ask("submit before 1 40 60")
        expected = front.ask("result before")
        assert "groups=1+1->2" in front.ask("drop")
        pids = front.ask("state")["pids"]
        front.die()
    with FrontOnHost(hosts["f"], places) as front:
        state = wait_for(front, lambda state: not state["missing"])
        assert state["pids"] == pids and len(state["groups"]) == 1
        front.ask("submit after 1 40 60")
        assert front.ask("result after") == expected
        assert front.ask("state")["errors"] == 0
    wait_until(lambda: not any(map(is_there, pids)), PATIENCE_S)
