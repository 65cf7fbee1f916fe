"""Two instances as processes on one device, a drop and a restore by hand, and what was answered."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Report
from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.tokens import TokenIds

PATIENCE_S = 180.0


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and when they came."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None


class Asker:
    """Asks greedily, and keeps what comes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.answers: dict[str, Answer] = {}

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        num_logprobs: int | None = None,
    ) -> None:
        """Begin one request."""
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs
        )
        self.answers[name] = Answer()
        request = Request(RequestId(name), TokenIds(prompt), sampling, 0.0)
        self.cluster.submit(request, self._deliver)

    def _deliver(self, token: TokenOutput) -> None:
        answer = self.answers[token.request_id]
        if token.token_id is not None:
            answer.tokens.append(token.token_id)
            answer.times_s.append(time.monotonic())
            answer.logprobs.append(token.logprobs)
        if token.finish_reason is not None:
            answer.finish = token.finish_reason

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait; TimeoutError after ``PATIENCE_S``."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def flow(self, num_tokens: int) -> None:
        """Every answer is at least so long, or done."""
        answers = self.answers.values()
        await self.until(lambda: all(len(a.tokens) >= num_tokens or a.finish for a in answers))

    async def done(self) -> None:
        """Every answer has ended, with all its tokens."""
        await self.until(lambda: all(answer.finish for answer in self.answers.values()))
        bad = [name for name, a in self.answers.items() if a.finish is not FinishReason.LENGTH]
        assert not bad, f"answers ended early: {bad}"

    async def change(self, to: Callable[[], Awaitable[str]]) -> TransitionRecord:
        """Ask for a drop or a restore until it can be; its account once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                known = len(self.cluster.state().transitions)
                try:
                    await to()
                    break
                except InvalidRequest:
                    await asyncio.sleep(0.02)
            while True:
                records = self.cluster.state().transitions
                # Others may come by themselves: the one asked for is the latest that ended.
                if len(records) > known and records[-1].finished_s is not None:
                    break
                await asyncio.sleep(0.005)
        record = records[-1]
        assert record.outcome.value == "done", record.ending
        return record

    def pauses_s(self, from_s: float, until_s: float) -> list[float]:
        """Between two tokens of one answer, of which the later came in that time; sorted."""
        return sorted(
            after - before
            for answer in self.answers.values()
            for before, after in itertools.pairwise(answer.times_s)
            if from_s <= after <= until_s
        )


Story = Callable[[Asker], Awaitable[None]]


def with_cluster(config: KunServeConfig, vocab_size: int, story: Story) -> float:
    """Run ``story`` on a cluster of its own; seconds until that was ready."""

    async def live() -> float:
        began = time.monotonic()
        cluster = await LocalCluster.start(Plan(config), vocab_size=vocab_size)
        ready_s = time.monotonic() - began
        try:
            await story(Asker(cluster))
        finally:
            await cluster.close()
        return ready_s

    return asyncio.run(live())


def describe(report: Report, record: TransitionRecord, **settings: int | str) -> None:
    """The server's own account of a transition."""
    where = {"transition": record.kind, **settings}
    finished_s, committed_s = record.finished_s, record.committed_s
    assert finished_s is not None and committed_s is not None, record
    exchange_s = finished_s - committed_s
    report.add("remap", record.remap_s * 1e3, "ms", **where)
    report.add("commit gap", record.gap_s * 1e3, "ms", **where)
    report.add("preparing, between steps", record.prepare_s * 1e3, "ms", **where)
    report.add("unmapping, between steps, so far", record.tidy_s * 1e3, "ms", **where)
    report.add("longest stall", record.max_stall_s * 1e3, "ms", **where)
    report.add("from order to end", (finished_s - record.started_s) * 1e3, "ms", **where)
    report.add("freed", record.freed_bytes / (1 << 20), "MiB", **where)
    report.add("moved", record.moved_bytes / (1 << 20), "MiB", **where)
    speed = record.moved_bytes / exchange_s / 1e9 if exchange_s > 0 else None
    report.add("exchange", speed, "GB/s", **where)
