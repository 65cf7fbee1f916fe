"""Real processes that die, hang, refuse to start: nobody waits for ever, and all is mended."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from benchmarks.faults.faulty_instance import POISON
from kunserve.cluster.driver.local import LocalCluster
from kunserve.control.cluster import forming
from kunserve.control.cluster.controller import Controller
from kunserve.core.errors import ConfigError, Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Message, Submit, TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.transport.wire.channel import FrontChannel
from tests.running.live_cluster import PATIENCE_S, Client, until, with_cluster

ZERO, ONE = InstanceId(0), InstanceId(1)

pytestmark = pytest.mark.timeout(300)  # a busy machine; the tests have deadlines of their own


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def hang_until_replaced(
    cluster: LocalCluster, client: Client, faults: Path, victims: set[InstanceId]
) -> None:
    """A loop hangs in a step, so that each victim must get work: requests come all the time."""
    pids = {victim: cluster.pid_of(victim) for victim in victims}
    for victim in victims:
        (faults / f"hang-{victim}").touch()
    async with asyncio.timeout(PATIENCE_S):
        while pids:
            with contextlib.suppress(Unavailable):
                client.submit(f"while-hanging-{len(client.requests)}", max_tokens=10)
            await asyncio.sleep(0.25)
            for victim, pid in tuple(pids.items()):
                if cluster.pid_of(victim) not in (pid, None):
                    (faults / f"hang-{victim}").unlink()
                    del pids[victim]


def test_a_replacement_that_dies_while_it_loads_is_replaced(tmp_path: Path) -> None:
    """The rest serves; the capacity that is missing shows, and comes back."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        (tmp_path / "refuse-1").touch()
        client.submit("before", max_tokens=100)
        await cluster.kill(ONE)
        await until(lambda: cluster.vitals().num_missing == 1)
        seen: set[int] = set()

        def has_started_thrice() -> bool:
            seen.add(cluster.pid_of(ONE) or 0)
            return len(seen - {0}) >= 3

        await until(has_started_thrice)
        client.submit("meanwhile")
        await client.all_done()
        assert cluster.is_healthy() and cluster.vitals().num_missing == 1
        (tmp_path / "refuse-1").unlink()
        await until(lambda: cluster.vitals().num_missing == 0)
        assert len(cluster.state().groups) == 2

    with_cluster(story, faults=tmp_path)


@pytest.mark.parametrize("dropped", [False, True])
def test_an_instance_whose_loop_hangs_is_replaced(tmp_path: Path, dropped: bool) -> None:
    """It beats, so only its lack of progress shows."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(6):
            client.submit(f"r{i}", max_tokens=300)
        await client.all_flow()
        if dropped:
            await cluster.drop(None)
        await hang_until_replaced(cluster, client, tmp_path, {ONE})
        await client.all_done()
        await until(lambda: cluster.vitals().num_missing == 0)

    with_cluster(story, faults=tmp_path, hang_timeout_s=5.0)


def test_all_loops_hang(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(4):
            client.submit(f"r{i}", max_tokens=200)
        await client.all_flow()
        await hang_until_replaced(cluster, client, tmp_path, {ZERO, ONE})
        await client.all_done()

    with_cluster(story, faults=tmp_path, hang_timeout_s=5.0)


def test_nothing_can_be_started(tmp_path: Path) -> None:
    """A stream ends with an error instead of staying open without a word."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        client.submit("hopeless", max_tokens=2000)
        await client.all_flow()
        (tmp_path / "refuse-0").touch()
        await cluster.kill(ZERO)
        await client.until(lambda: "hopeless" in client.ends)
        assert client.ends.pop("hopeless") is FinishReason.ERROR
        del client.requests["hopeless"]
        with pytest.raises(Unavailable):
            client.submit("refused")
        assert cluster.num_unfinished() == 0
        (tmp_path / "refuse-0").unlink()
        await until(lambda: cluster.vitals().num_missing == 0)
        client.submit("again")
        await client.all_done()

    with_cluster(story, num_instances=1, faults=tmp_path)


def test_a_request_that_takes_too_long_ends(tmp_path: Path) -> None:
    """Whatever holds it up: here its only instance hangs, and is not yet known to."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        client.submit("late", max_tokens=2000)
        await client.all_flow()
        (tmp_path / "hang-0").touch()
        await client.until(lambda: "late" in client.ends)
        assert client.ends["late"] is FinishReason.ERROR
        (tmp_path / "hang-0").unlink()

    with_cluster(story, num_instances=1, faults=tmp_path, request_timeout_s=5.0)


def test_a_request_that_kills_its_instance_is_found_out(tmp_path: Path) -> None:
    """It ends with an error after three deaths; everybody else gets all tokens."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        (tmp_path / "poison").touch()
        for i in range(6):
            client.submit(f"r{i}", max_tokens=300)
        await client.all_flow()
        client.submit("poison", prompt=POISON)
        await client.until(lambda: "poison" in client.ends)
        assert client.ends.pop("poison") is FinishReason.ERROR
        del client.requests["poison"]
        await client.all_done()
        await until(lambda: cluster.vitals().num_missing == 0)

    with_cluster(story, faults=tmp_path)


@pytest.mark.parametrize("fault", ["stuck", "eio"])
def test_a_disk_that_hangs_or_fails_costs_its_instance_and_no_request(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other member of its pipeline has died, so nobody else has the layers."""
    monkeypatch.setattr(forming, "PATIENCE_S", 1.0)

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(6):
            client.submit(f"r{i}", max_tokens=300)
        await client.all_flow()
        await cluster.drop(None)
        (tmp_path / f"{fault}-0").touch()
        pid = cluster.pid_of(ZERO)
        await cluster.kill(ONE)
        await until(lambda: cluster.pid_of(ZERO) not in (pid, None))
        await client.all_done()
        await until(lambda: cluster.vitals().num_missing == 0)
        assert cluster.state().num_deaths == 2 and cluster.state().num_quarantined == 0
        assert not cluster._controller._requests.quarantine._points

    with_cluster(story, faults=tmp_path)
    if fault == "stuck":
        assert "instance killed instance=0 reason='it forms a group, and nothing" in caplog.text


def test_a_broken_connection_is_a_failure_of_its_instance(tmp_path: Path) -> None:
    """Of what was on its way nothing is missed in silence: requests run again, or go on."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(6):
            client.submit(f"r{i}", max_tokens=400)
        await client.all_flow()
        await cluster.drop(None)
        (tmp_path / "cut-1").touch()
        await until(lambda: not (tmp_path / "cut-1").exists())
        await client.all_done()
        await until(lambda: cluster.vitals().num_missing == 0)

    with_cluster(story, faults=tmp_path, hang_timeout_s=5.0)


def test_a_word_lost_between_instances_costs_no_process(tmp_path: Path) -> None:
    """The receiver misses it; both form anew, and requests run again."""

    async def story(cluster: LocalCluster, client: Client) -> None:
        for i in range(6):
            client.submit(f"r{i}", max_tokens=400)
        await client.all_flow()
        await cluster.drop(None)
        pids = cluster.pid_of(ZERO), cluster.pid_of(ONE)
        ids = {group.group_id for group in cluster.state().groups}
        (tmp_path / "mute-1").touch()
        await until(lambda: ids.isdisjoint(g.group_id for g in cluster.state().groups))
        assert not (tmp_path / "mute-1").exists()
        await client.all_done()
        assert (cluster.pid_of(ZERO), cluster.pid_of(ONE)) == pids

    with_cluster(story, faults=tmp_path)


def test_errors_in_ticks_stop_neither_detection_nor_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        def fail(self: Controller, now_s: float) -> None:
            raise RuntimeError("injected")

        for i in range(4):
            client.submit(f"r{i}", max_tokens=200)
        await client.all_flow()
        tick = Controller.tick
        monkeypatch.setattr(Controller, "tick", fail)
        await until(lambda: cluster.vitals().num_errors > 2)
        pid = cluster.pid_of(ONE)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: cluster.pid_of(ONE) not in (pid, None))
        assert not is_there(pid)
        assert cluster.vitals().num_errors > 2
        monkeypatch.setattr(Controller, "tick", tick)
        await client.all_done()

    with_cluster(story, may_err=True, heartbeat_timeout_s=5.0)


def test_a_client_that_fails_costs_the_others_nothing() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        def fail(token: TokenOutput) -> None:
            raise RuntimeError("injected")

        broken = Request(
            RequestId("broken"), TokenIds((1, 2, 3)), SamplingParams(max_tokens=50), 0.0
        )
        cluster.submit(broken, fail)
        for i in range(4):
            client.submit(f"r{i}", max_tokens=100)
        await client.all_done()
        assert cluster.vitals().num_errors > 0
        await until(lambda: cluster.num_unfinished() == 0)

    with_cluster(story, may_err=True)


def test_a_message_that_cannot_be_sent_is_a_failure_of_its_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        send = FrontChannel.send
        unsent: list[Message] = []

        def lose_one(self: FrontChannel, instance_id: InstanceId, message: Message) -> bool:
            if isinstance(message, Submit) and not unsent:
                unsent.append(message)
                return False
            return send(self, instance_id, message)

        pids = {cluster.pid_of(ZERO), cluster.pid_of(ONE)}
        monkeypatch.setattr(FrontChannel, "send", lose_one)
        for i in range(4):
            client.submit(f"r{i}", max_tokens=50)
        await client.all_done()
        assert unsent
        await until(lambda: cluster.vitals().num_missing == 0)
        assert len(pids & {cluster.pid_of(ZERO), cluster.pid_of(ONE)}) == 1

    with_cluster(story)


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    """Also of instances that hang, are stopped, or are still loading."""
    pids: list[int] = []

    async def story(cluster: LocalCluster, client: Client) -> None:
        client.submit("r", max_tokens=500)
        await client.all_flow()
        (tmp_path / "hang-0").touch()
        (tmp_path / "sleep-2").touch()
        await cluster.kill(InstanceId(2))
        await until(lambda: cluster.pid_of(InstanceId(2)) is None)
        await until(lambda: cluster.pid_of(InstanceId(2)) is not None)
        pids.extend(pid for i in range(4) if (pid := cluster.pid_of(InstanceId(i))) is not None)
        os.kill(pids[1], signal.SIGSTOP)

    with_cluster(story, num_instances=4, faults=tmp_path)
    assert len(pids) == 4 and not any(is_there(pid) for pid in pids)


def test_instances_that_cannot_start_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "refuse-1").touch()

    async def story(cluster: LocalCluster, client: Client) -> None:
        raise AssertionError("it serves")

    with pytest.raises(ConfigError, match="instance 1 did not start: exit code 1"):
        with_cluster(story, faults=tmp_path)
    (tmp_path / "refuse-1").unlink()
    (tmp_path / "sleep-1").touch()
    with pytest.raises(ConfigError, match=r"instance \d did not start: not ready within 2 s"):
        with_cluster(story, faults=tmp_path, start_timeout_s=2.0)
