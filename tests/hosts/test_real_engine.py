"""SmolLM2 on two hosts, two instances each, a front on a third: the same tokens through it all."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.links.hosts import Hosts
from benchmarks.links.hosts_front import FrontOnHost
from tests.hosts.test_two_hosts import orders, wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

GBPS = 0.1
"""Paced so that an exchange takes long enough to be cut."""
NUM_PROMPT, NUM_TOKENS = 200, 60


class Story:
    """Requests that all have the same prompts, and must give the same tokens."""

    def __init__(self, front: FrontOnHost) -> None:
        self.front = front
        self._num = 0
        self._expected = [self._answer(self._submit(seed)) for seed in range(3)]

    def _submit(self, seed: int) -> str:
        self._num += 1
        name = f"r{self._num}"
        self.front.ask(f"submit {name} {seed} {NUM_PROMPT} {NUM_TOKENS}")
        return name

    def _answer(self, name: str) -> list[Any]:
        found: list[Any] = self.front.ask(f"result {name}")
        return found

    def while_running(self, num_requests: int, act: Callable[[], None]) -> None:
        """Let something happen beside requests that run, and prove their tokens."""
        names = [self._submit(number % 3) for number in range(num_requests)]
        for name in names:
            self.front.ask(f"flow {name} 2")
        act()
        for number, name in enumerate(names):
            assert self._answer(name) == self._expected[number % 3], (number, name)

    def drop_to_one(self) -> None:
        """Merge everything, within hosts and across them."""
        while len(self.front.ask("state")["groups"]) > 1:
            self.front.ask("drop")

    def restored(self) -> None:
        wait_for(self.front, lambda state: not state["missing"] and state["used_blocks"] == 0)
        while max(map(len, self.front.ask("state")["groups"])) > 1:
            self.front.ask("restore")


def test_tokens_stay_the_same_through_drops_kills_and_partitions(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts("f", "a", "b", gbps=1.0)
    with FrontOnHost(
        hosts["f"],
        orders(hosts, "aabb", "f", model="smollm2-135m", link_gbps=GBPS),
    ) as front:
        story = Story(front)

        story.while_running(8, story.drop_to_one)
        state = front.ask("state")
        assert [len(group) for group in state["groups"]] == [4] and state["moved_bytes"] > 0
        story.restored()

        def cut_in_exchange() -> None:
            story.drop_to_one()  # committed: the exchange has begun
            hosts.cut("a", "b")
            wait_for(front, lambda state: len(state["groups"]) == 4)
            assert front.ask("state")["outcomes"][-1] == "failed"
            hosts.heal("a", "b")

        story.while_running(8, cut_in_exchange)
        story.restored()

        def kill_a_host() -> None:
            story.drop_to_one()
            front.ask("kill 2 3")

        story.while_running(6, kill_a_host)
        story.restored()

        def cut_in_commit() -> None:
            while len(front.ask("state")["groups"]) > 2:
                front.ask("drop")
            told = front.tell("drop")
            hosts.cut("b", "a")
            front.hear(told)
            hosts.heal("b", "a")

        story.while_running(6, cut_in_commit)
        state = front.ask("state")
        assert state["errors"] == 0 and state["deaths"] == 2
