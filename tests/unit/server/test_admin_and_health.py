"""Endpoints for operators: health, drain, and forced transitions that must show an effect."""

import asyncio
import re
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from click.testing import CliRunner, Result

import kunserve_extras.admin as admin_routes
from kunserve.cluster.api import Vitals
from kunserve.control.cluster.scaling import NOT_STARTED
from kunserve.core.config import ServerConfig
from kunserve.core.errors import ConfigError, Overloaded
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import ClusterSize, ObservedDrops
from kunserve.server.start.command import serve_command
from kunserve_extras.scale_command import scale_command
from tests.conftest import wait_until
from tests.unit.server.echo_engine import LAYERS, EchoEngine, idle_state, instance_state
from tests.unit.server.live_server import LiveServer, live_server

BODY = {"prompt": "ab", "max_tokens": 400}
JSON = {"content-type": "application/json"}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Generator[LiveServer, None, None]:
    monkeypatch.setattr(admin_routes, "VERIFY_S", 0.2)
    monkeypatch.setattr(admin_routes, "TURN_S", 0.2)
    settings = ServerConfig(enable_admin=True, shutdown_timeout_s=1.0)
    with live_server(server=settings) as server:
        yield server


def test_admin_is_off_by_default() -> None:
    with live_server() as server, server.client() as client:
        for action in ("drop", "restore", "kill", "scale", "pause", "resume"):
            answer = client.post(f"/kunserve/{action}", json={"instance_id": 0})
            assert answer.status_code == 403
            assert "--enable-admin" in answer.json()["error"]["message"]
        assert client.post("/reset_prefix_cache").status_code == 403
        assert client.get("/kunserve/drop").status_code == 405
        assert server.engine.snapshot.num_drops == 0


def test_drop_and_restore_answer_with_what_changed(admin: LiveServer) -> None:
    with admin.client() as client:
        dropped = client.post("/kunserve/drop", json={"bytes": 100}).json()
        assert (dropped["dropped_bytes_before"], dropped["dropped_bytes_after"]) == (0, 16384)
        assert len(dropped["state"]["groups"]) == 1
        again = client.post("/kunserve/drop", headers=JSON)
        assert again.status_code == 400 and "nothing is left" in again.text
        restored = client.post("/kunserve/restore", headers=JSON).json()
        assert restored["dropped_bytes_after"] == 0
        assert len(restored["state"]["groups"]) == 2


def test_a_restore_of_some_pipelines_is_one(
    admin: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = admin.engine

    async def of_one() -> str:
        first, other = engine.snapshot.instances
        whole = replace(first, held=LayerRange(0, LAYERS))
        engine.snapshot = replace(engine.snapshot, instances=(whole, other))
        return "1 group split; not restored: a large request"

    monkeypatch.setattr(engine, "restore", of_one)
    with admin.client() as client:
        client.post("/kunserve/drop", headers=JSON)
        answer = client.post("/kunserve/restore", headers=JSON)
        assert answer.status_code == 200, answer.text
        assert answer.json()["result"].endswith("not restored: a large request")
        found = [answer.json()[f"dropped_bytes_{when}"] for when in ("before", "after")]
        assert found == [16384, 8192]


def test_a_size_that_is_asked_for(admin: LiveServer) -> None:
    with admin.client() as client:
        answer = client.post("/kunserve/scale", json={"num_instances": 3}).json()
        assert answer["result"] == "3 instances"
        size = {"wanted": 3, "ordered": 0, "leaving": 0, "fewest": 3, "most": None}
        assert answer["state"]["size"] == size
        for wrong in ({}, {"num_instances": 0}, {"num_instances": "3"}, {"num_instances": 5}):
            refused = client.post("/kunserve/scale", json=wrong)
            assert refused.status_code == 400 and "num_instances" in refused.text, wrong
        admin.engine.lying = True
        other = client.post("/kunserve/scale", json={"num_instances": 2})
        assert other.status_code == 409 and "3 instances are wanted now, not 2" in other.text
        why = f"{NOT_STARTED}: no memory"
        admin.engine.snapshot = replace(admin.engine.snapshot, reasons=("another", why))
        full = client.post("/kunserve/scale", json={"num_instances": 4})
        assert full.status_code == 503 and full.headers["Retry-After"] == "60"
        assert full.json()["error"]["message"].endswith("could not be started: no memory")


def test_sizes_are_asked_for_in_turn(admin: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    real = admin.engine.scale

    async def slow(num_instances: int) -> str:
        has_begun.set()
        while not may_go_on.is_set():
            await asyncio.sleep(0.001)
        return await real(num_instances)

    monkeypatch.setattr(admin.engine, "scale", slow)

    def ask(num_instances: int) -> int:
        with admin.client() as client:
            body = {"num_instances": num_instances}
            return int(client.post("/kunserve/scale", json=body).status_code)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask, 3)
        assert has_begun.wait(30.0)
        with admin.client() as client:
            late = client.post("/kunserve/scale", json={"num_instances": 4})
        assert late.status_code == 503 and "is being asked for" in late.text
        both = [threads.submit(ask, size) for size in (2, 4)]
        may_go_on.set()
        assert [first.result(), *(one.result() for one in both)] == [200, 200, 200]


def test_the_command_asks_and_waits(admin: LiveServer) -> None:
    def scale(*words: str) -> Result:
        return CliRunner().invoke(scale_command, [*words, "--base-url", admin.url])

    done = scale("3")
    assert done.exit_code == 0 and done.output == "3 instances\n3 instances serve\n"
    assert scale("2", "--no-wait").output == "2 instances\n"
    refused = scale("9")
    assert refused.exit_code == 1 and "must be from 1 to 4" in refused.output
    assert scale("0").exit_code == 2
    size = ClusterSize(wanted=3, ordered=1, fewest=3)
    admin.engine.snapshot = replace(admin.engine.snapshot, size=size)
    admin.engine.lying = True
    late = scale("3", "--timeout", "0.01")
    assert "2 instances serve, 1 start and 0 leave" in late.output and late.exit_code == 1
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:port"):
        nobody = CliRunner().invoke(scale_command, ["2", "--url", url])
        assert nobody.exit_code == 1 and f"no answer from {url}" in nobody.output, nobody.output


def test_pause_and_resume(admin: LiveServer) -> None:
    with admin.client() as client:
        assert "kunserve:paused{" in client.get("/metrics").text
        for action, paused, number in (("pause", True, "1.0"), ("resume", False, "0.0")):
            first = client.post(f"/kunserve/{action}", headers=JSON).json()
            assert first["state"]["paused"] is paused and "before" not in first["result"]
            again = client.post(f"/kunserve/{action}", json={}).json()
            assert again["result"].endswith("it was so before")
            assert client.get("/kunserve/state").json()["paused"] is paused
            assert f'kunserve:paused{{model_name="tiny"}} {number}' in client.get("/metrics").text
        assert client.post("/kunserve/pause", json={"for": 5}).status_code == 400
        assert client.post("/kunserve/pause", headers={"origin": "http://a"}).status_code == 403


def test_the_prefix_cache_is_reset_as_in_vllm(admin: LiveServer) -> None:
    admin.configure(num_cached=16)
    with admin.client() as client:
        for headers in ({"origin": "http://a"}, {"sec-fetch-site": "cross-site"}):
            assert client.post("/reset_prefix_cache", headers=headers).status_code == 403
        running = client.post("/reset_prefix_cache?reset_running_requests=true")
        assert running.status_code == 400 and "must be false" in running.text
        assert admin.engine.num_cached == 16
        answer = client.post("/reset_prefix_cache?reset_running_requests=False")
        assert answer.status_code == 200 and not answer.content
        assert admin.engine.num_cached == 0
        assert client.get("/reset_prefix_cache").status_code == 405


def test_what_drops_would_have_done_is_in_the_metrics(admin: LiveServer) -> None:
    with admin.client() as client:
        assert "kunserve:observed_merges{" not in client.get("/metrics").text
        seen = ObservedDrops(2, 1, 4096, num_requests=7, wait_s=12.5, num_merged=1)
        admin.configure(snapshot=replace(admin.engine.snapshot, observed=seen))
        text = client.get("/metrics").text
        for name, value in (
            ("merges", 1.0),
            ("requests_waiting", 0.0),
            ("drops_total", 2.0),
            ("restores_total", 1.0),
            ("freed_bytes_total", 4096.0),
            ("requests_total", 7.0),
            ("wait_seconds_total", 12.5),
        ):
            assert f'kunserve:observed_{name}{{model_name="tiny"}} {value}\n' in text
        assert client.get("/kunserve/state").json()["observed"]["freed_bytes"] == 4096


def test_kill(admin: LiveServer) -> None:
    with admin.client() as client:
        killed = client.post("/kunserve/kill", json={"instance_id": 1})
        assert [one["alive"] for one in killed.json()["state"]["instances"]] == [True, False]
        for body in ({"instance_id": 1}, {"instance_id": 9}, {}, {"instance_id": "1"}):
            assert client.post("/kunserve/kill", json=body).status_code == 400


def test_a_success_that_changed_nothing_is_a_failure(admin: LiveServer) -> None:
    admin.configure(lying=True)
    with admin.client() as client:
        dropped = idle_state().instances[0], instance_state(1, 0, LAYERS // 2)
        admin.engine.snapshot = replace(admin.engine.snapshot, instances=dropped)
        for action, body in (("drop", {}), ("restore", {}), ("kill", {"instance_id": 0})):
            answer = client.post(f"/kunserve/{action}", json=body)
            assert answer.status_code == 500
            assert "does not show it" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"bytes": 0}, {"bytes": "1"}, {"byte": 5}, []])
def test_bad_admin_bodies(admin: LiveServer, body: object) -> None:
    with admin.client() as client:
        assert client.post("/kunserve/drop", json=body).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        JSON | {"origin": "http://evil.example"},
        JSON | {"origin": "null"},
        JSON | {"sec-fetch-site": "cross-site"},
        JSON | {"sec-fetch-site": "same-site"},
        JSON | {"host": "attacker.example"},
        JSON | {"host": "attacker.example:8000"},
        JSON | {"host": "127.0.0.1.attacker.example"},
    ],
    ids=str,
)
def test_no_web_page_drops_or_kills(admin: LiveServer, headers: dict[str, str]) -> None:
    with admin.client() as client:
        for action, body in (("drop", b"{}"), ("restore", b""), ("kill", b'{"instance_id": 1}')):
            answer = client.post(f"/kunserve/{action}", content=body, headers=headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "PermissionDeniedError"
        snapshot = admin.engine.snapshot
        assert snapshot.num_drops == 0 and all(one.alive for one in snapshot.instances)


def test_no_rebound_name_reads_the_state(admin: LiveServer) -> None:
    with admin.client() as client:
        for path in ("/kunserve/state", "/v1/models", "/dashboard"):
            assert client.get(path, headers={"host": "attacker.example"}).status_code == 403
            for host in ("localhost", "localhost:1", "127.0.0.1", "127.8.0.1:80", "[::1]:8000"):
                assert client.get(path, headers={"host": host}).status_code == 200
        assert client.get("/health", headers={"host": "pod.cluster"}).status_code == 200


def test_the_own_page_may_ask(admin: LiveServer) -> None:
    own = JSON | {"origin": admin.url, "sec-fetch-site": "same-origin"}
    with admin.client() as client:
        assert client.post("/kunserve/drop", content=b"{}", headers=own).status_code == 200


def test_who_has_the_key_needs_no_more() -> None:
    settings = ServerConfig(enable_admin=True, api_key="k", shutdown_timeout_s=1.0)
    with live_server(server=settings) as server, server.client() as client:
        headers = {"authorization": "Bearer k", "host": "proxy.example"}
        assert client.post("/kunserve/drop", headers=headers).status_code == 200
        assert client.post("/kunserve/drop", headers={"host": "x"}).status_code == 401


@pytest.mark.parametrize("key", ["", " ", "k "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(api_key=key)
    refused = CliRunner().invoke(serve_command, ["--api-key", key])
    assert refused.exit_code == 1 and "API key must not be empty" in refused.output


def test_health_and_readiness() -> None:
    with live_server() as server, server.client() as client:
        assert client.get("/health").status_code == 200
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        server.configure(progressing=False)
        assert client.get("/health").status_code == 200
        assert client.get("/health/ready").json()["status"] == "stuck"
        server.configure(healthy=False)
        assert client.get("/health").status_code == 503
        assert client.get("/health/ready").status_code == 503


def test_missing_capacity_shows_while_the_rest_serves() -> None:
    with live_server() as server, server.client() as client:
        whole = {"status": "ok", "instances": 2, "instances_missing": 0, "instances_starting": 0}
        assert client.get("/health").json() == whole
        assert "kunserve:instances_missing{" in client.get("/metrics").text
        server.configure(wholeness=Vitals(2, num_missing=1, num_errors=3))
        answer = client.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {**whole, "status": "degraded", "instances_missing": 1}
        metrics = client.get("/metrics").text
        for state, num in (("serving", 1), ("missing", 1), ("starting", 0), ("leaving", 0)):
            found = re.search(
                rf'kunserve:instances\{{[^}}]*state="{state}"[^}}]*\}} (\S+)', metrics
            )
            assert found is not None and float(found[1]) == num, state
        server.configure(wholeness=Vitals(3, num_missing=0, num_errors=0, num_starting=1))
        growing = {**whole, "instances": 3, "instances_starting": 1}
        assert client.get("/health").json() == growing, "more are coming, and nobody is missing"
        assert re.search(r"kunserve:instances_missing\{[^}]*\} 1.0", metrics)
        assert re.search(r"kunserve:internal_errors_total\{[^}]*\} 3.0", metrics)
        assert client.get("/health/ready").status_code == 200


def test_bad_requests_are_nobodys_failure() -> None:
    """A client's 4xx reaches no instance and leaves every instance in good standing."""
    with live_server() as server, server.client() as client:
        before = client.get("/kunserve/state").json()["instances"]
        for body in (
            {},
            {"prompt": "ab", "max_tokens": -1},
            {"prompt": 1},
            {"prompt": "ab" * 9000},
        ):
            for _ in range(10):
                assert client.post("/v1/completions", json=body).status_code == 400
        assert client.post("/v1/completions", json={**BODY, "model": "no"}).status_code == 404
        assert not server.engine.tasks
        assert client.get("/health").status_code == 200
        assert client.get("/health/ready").json() == {"status": "ready", "unfinished": 0}
        assert client.get("/kunserve/state").json()["instances"] == before
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_busy_is_not_dead() -> None:
    with live_server(EchoEngine(held=True)) as server, server.client() as client:
        posting = start_posts(server, 100)
        wait_until(lambda: len(server.engine.tasks) == 100)
        assert client.get("/health/ready").json() == {"status": "ready", "unfinished": 100}
        server.configure(held=False)
        for thread in posting:
            thread.join()


def start_posts(
    server: LiveServer, count: int, into: list[httpx.Response] | None = None
) -> list[threading.Thread]:
    def post() -> None:
        with server.client() as client:
            answer = client.post("/v1/completions", json=BODY)
            if into is not None:
                into.append(answer)

    threads = [threading.Thread(target=post) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_drain_finishes_what_is_in_flight() -> None:
    engine = EchoEngine(hold_after=5)
    with live_server(engine) as server, server.client() as client:
        answers: list[httpx.Response] = []
        (posting,) = start_posts(server, 1, answers)
        wait_until(lambda: engine.tasks)
        server.request_drain()
        wait_until(lambda: server.front.draining)
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert client.get("/health").status_code == 200
        assert client.get("/health/ready").json()["status"] == "draining"
        server.configure(hold_after=None)
        posting.join()
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 400


@pytest.mark.parametrize("signals", [1, 2])
def test_drain_ends_by_timeout_or_by_a_second_signal(signals: int) -> None:
    timeout_s = 0.5 if signals == 1 else 60.0
    engine = EchoEngine(hold_after=5)
    with live_server(engine, ServerConfig(shutdown_timeout_s=timeout_s)) as server:
        answers: list[httpx.Response] = []
        (posting,) = start_posts(server, 1, answers)
        streamed = BODY | {"stream": True}
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=streamed) as one,
        ):
            wait_until(lambda: len(engine.tasks) == 2)
            for _ in range(signals):
                server.request_drain()
            events = [line for line in one.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert '"code":503' in events[-2] and "shut down" in events[-2]
        posting.join()
        server.thread.join(50)
        assert not server.thread.is_alive(), "before the 60 s of a patient drain"
        assert answers[0].status_code == 503
        assert len(engine.aborted) == 2


class Undecided(EchoEngine):
    """Takes requests as a controller in another process does: its answer comes later."""

    answers = False

    async def admitted(self, request_id: RequestId) -> None:
        while not self.answers:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_forced", [False, True])
def test_drain_waits_for_requests_that_are_being_admitted(is_forced: bool) -> None:
    engine = Undecided()
    with live_server(engine) as server, server.client() as client:
        answers: list[httpx.Response] = []
        (posting,) = start_posts(server, 1, answers)
        wait_until(lambda: engine.submitted)
        assert client.get("/load").json() == {"server_load": 1}
        server.request_drain()
        wait_until(lambda: server.front.draining)
        assert server.call(lambda: server.front.num_in_flight) == 1
        assert client.get("/health").status_code == 200
        if is_forced:
            server.request_drain()
            wait_until(lambda: server.front._is_interrupted)
        else:
            assert not server.front._is_interrupted
        engine.answers = True
        posting.join()
        assert answers[0].status_code == (503 if is_forced else 200), answers[0].text
        assert server.front.num_in_flight == 0


def test_who_is_refused_is_in_flight_no_more() -> None:
    engine = EchoEngine(refusal=lambda request: Overloaded("full"))
    with live_server(engine) as server, server.client() as client:
        for body in (BODY, BODY | {"model": "none"}, BODY | {"n": -1}):
            assert client.post("/v1/completions", json=body).status_code >= 400
        assert client.get("/load").json() == {"server_load": 0}
