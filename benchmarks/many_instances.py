"""One front and many instances: start, dispatch, reports, a plan with drops, shutdown.

    python -m benchmarks.many_instances [--instances 1000] [--reports 10]

The front is real: ``LocalCluster`` with its controller, its channel and HTTP on the same loop. The
instances are real agents with fake bodies, all in one other process (`benchmarks.fake_host`), so
what the front reads and writes is what it would of so many processes. It has half of a two-core
machine to itself. What instances say to each other stays in their process.

Other work on the machine makes wall times longer; dispatch and plan are processor time.

start     until all stand in groups and HTTP answers
reports   processor time of the front's thread per second and per report, while nothing runs
dispatch  a request's way through ``submit``: median and P99 of 1,000, while others run
plan      ``plan_drop`` over all groups, by itself: half of all instances pressed
drop      the front's longest pause, as HTTP would see it, from a shortage until merges have ended
shutdown  ``close`` until no instance is left
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import uvloop

from benchmarks.fake_host import HostLauncher
from benchmarks.front_overhead import ByteTokenizer
from benchmarks.report import Report
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import Outcome
from kunserve.core.tokens import TokenIds
from kunserve.policy.drop.plan import Limits, Standing, Wanted, plan_drop
from kunserve.server.start.app import create_app
from kunserve.server.start.serve import Drain, serve
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

FAKE = FakeSettings(FAKE_MODULE, kv_blocks=64, layer_bytes=16 * 1024, step_s=0.2)
LAG_PERIOD_S = 0.002


class Lag:
    """How long the event loop does not come round, as every client feels it."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.busy_s: list[float] = []
        """Processor time of the same pauses: neighbours on the machine are not in it."""

    async def _watch(self) -> None:
        while True:
            due_s, cpu_s = time.perf_counter() + LAG_PERIOD_S, time.thread_time()
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(time.perf_counter() - due_s)
            self.busy_s.append(time.thread_time() - cpu_s)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Inside, lags are collected."""
        self.lags_s, self.busy_s = [], []
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    def tell(self, report: Report, name: str, **case: int) -> None:
        """The longest of those inside."""
        report.add(f"{name}, longest pause", max(self.lags_s, default=0.0) * 1e3, "ms", **case)
        busy_ms = max(self.busy_s, default=0.0) * 1e3
        report.add(f"{name}, its processor time", busy_ms, "ms", **case)


@contextlib.contextmanager
def clocked(report: Report, name: str, **case: int) -> Iterator[None]:
    """Wall and processor time of what is inside."""
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    yield
    report.add(name, time.perf_counter() - started_s, "s", **case)
    report.add(f"{name}, processor time", time.thread_time() - cpu_s, "s", **case)


def config_of(num_instances: int, num_reports: float) -> KunServeConfig:
    """Settings for so many."""
    return KunServeConfig(
        instance=InstanceConfig(block_size=16, granule_bytes=4096),
        scheduler=SchedulerConfig(max_num_batched_tokens=512),
        overload=OverloadConfig(dwell_s=0.5),
        cluster=ClusterConfig(
            num_instances=num_instances,
            report_period_s=1.0 / num_reports,
            heartbeat_timeout_s=120.0,  # the machine may be busy with something else
            front_grace_s=0.0,
        ),
    )


def request(name: str, prompt_tokens: int, output_tokens: int) -> Request:
    """One prompt."""
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    prompt = TokenIds([hash(name) % 900 + 1] * prompt_tokens)
    return Request(RequestId(name), prompt, sampling, time.monotonic())


def ignore(_: TokenOutput) -> None:
    """Nobody reads."""


def num_reported(cluster: LocalCluster) -> int:
    """Reports that have come so far from groups that stand."""
    groups = cluster._controller.placement.groups.values()
    return sum(group.report.sequence_number for group in groups)


async def idle_cost(report: Report, cluster: LocalCluster, lag: Lag, **case: int) -> None:
    """Reports and nothing else. The instances may be too slow to send all: so what came counts."""
    async with lag.watched():
        started_s, cpu_s, before = time.perf_counter(), time.thread_time(), num_reported(cluster)
        await asyncio.sleep(8.0)
        wall_s, spent_s = time.perf_counter() - started_s, time.thread_time() - cpu_s
        num = num_reported(cluster) - before
    report.add("reports", spent_s / wall_s, "cores", **case)
    report.add("reports that came", num / wall_s / case["instances"], "/s each", **case)
    report.add("processor time per report", spent_s / max(1, num) * 1e6, "us", **case)
    lag.tell(report, "reports", **case)


async def dispatch_cost(report: Report, cluster: LocalCluster, num: int, **case: int) -> None:
    """Requests that fit, a few at a time."""
    spent_ms = []
    for number in range(num):
        one = request(f"d{number}", 64, 8)
        started_s = time.thread_time()
        cluster.submit(one, ignore)
        spent_ms.append((time.thread_time() - started_s) * 1e3)
        if number % 20 == 19:
            await asyncio.sleep(0.02)
    report.add("dispatch median", statistics.median(spent_ms), "ms", **case)
    p99_ms = statistics.quantiles(spent_ms, n=100)[98]
    report.add("dispatch P99", p99_ms, "ms", **case)
    while cluster.num_unfinished():
        await asyncio.sleep(0.05)


def plan_cost(report: Report, cluster: LocalCluster, **case: int) -> None:
    """Algorithm 1 by itself."""
    placement = cluster._controller.placement
    layouts = [group.layout for group in placement.groups.values()]
    pressed = [layout.group_id for layout in layouts[::2]]
    started_s = time.thread_time()
    plan = plan_drop(
        Standing(layouts, placement.specs, GroupId(1 << 40)),
        Wanted(40 * len(layouts), pressed),
        Limits(min_deep_gain=0.2, head_cost_layers=1),
    )
    report.add("plan", (time.thread_time() - started_s) * 1e3, "ms", **case)
    report.add("plan, merges", len(plan.merges), "", **case)


async def drop_cost(
    report: Report, cluster: LocalCluster, port: int, lag: Lag, **case: int
) -> None:
    """Fill the memory of all instances: the monitor sees it, plans, and half of them merge."""
    num = case["instances"] * 3
    async with lag.watched(), httpx.AsyncClient() as client:
        for number in range(num):
            cluster.submit(request(f"f{number}", 400, 64), ignore)
            if number % 100 == 99:
                await asyncio.sleep(0.01)
        started_s, worst_s = time.perf_counter(), 0.0
        while time.perf_counter() - started_s < 60.0:
            asked_s = time.perf_counter()
            await client.get(f"http://127.0.0.1:{port}/livez", timeout=60.0)
            worst_s = max(worst_s, time.perf_counter() - asked_s)
            await asyncio.sleep(0.02)
            records = cluster._controller.transitions.records
            if records and not cluster._controller.transitions.active:
                break
    done = [r for r in cluster._controller.transitions.records if r.outcome is Outcome.DONE]
    report.add("drop, transitions", len(done), "", **case)
    report.add("drop, until all ended", time.perf_counter() - started_s, "s", **case)
    lag.tell(report, "drop", **case)
    report.add("drop, slowest /livez", worst_s * 1e3, "ms", **case)


async def measure(report: Report, num_instances: int, num_reports: float) -> None:
    """Everything, one after the other."""
    case = {"instances": num_instances}
    config, launcher, lag = config_of(num_instances, num_reports), HostLauncher(), Lag()
    with clocked(report, "start", **case):
        cluster = await LocalCluster.start(
            Plan(config), vocab_size=FAKE.vocab_size, fake=FAKE, launcher=launcher
        )
    listener = socket.create_server(("127.0.0.1", 0))
    drain = Drain()
    app = create_app(cluster, ByteTokenizer(), "bench", config)
    serving = asyncio.create_task(serve(app, config, [listener], drain))
    try:
        await asyncio.sleep(1.0)
        gc.freeze()  # as `kunserve serve` does
        await idle_cost(report, cluster, lag, **case)
        await dispatch_cost(report, cluster, 1000, **case)
        plan_cost(report, cluster, **case)
        await drop_cost(report, cluster, listener.getsockname()[1], lag, **case)
    finally:
        drain.request()
        await serving
        with clocked(report, "shutdown", **case):
            await cluster.close()
        await launcher.end()


def main() -> None:
    """One cluster of each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[1000])
    parser.add_argument("--reports", type=float, default=10.0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with Report("many_instances", reports_per_s=options.reports) as report:
        for num_instances in options.instances:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(report, num_instances, options.reports))


if __name__ == "__main__":
    main()
