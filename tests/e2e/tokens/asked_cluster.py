"""A cluster of the real engine in real processes, what is asked of it, and what it answers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import Launcher
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import Request, SamplingParams, TokenLogprobs
from kunserve.core.tokens import TokenIds
from tests.running.engines import BLOCKS
from tests.running.forking import ForkingLauncher
from tests.tiny_models import VOCAB

Story = Callable[[LocalCluster, "Answers"], Awaitable[None]]
FREE_ROWS = CostCoefficients(attention_s=0.0, token_s=1e-9, chunk_s=1e-3, shared_s=1e-3)
"""What schedulers believe of steps, so that they check all guesses."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SEEDED = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.95, seed=7)


class Wanted(NamedTuple):
    """A request."""

    prompt: list[int]
    num_tokens: int
    like: SamplingParams = GREEDY
    wants_scores: bool = True


class Answers:
    """Asks, and collects the tokens of every answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.wanted: dict[str, Wanted] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        """Of the prompts."""
        self.num_cached: dict[str, int] = {}
        self.num_right_guesses = 0
        self._done: dict[str, asyncio.Event] = {}

    def ask(
        self,
        name: str,
        prompt: list[int],
        num_tokens: int,
        like: SamplingParams,
        *,
        wants_scores: bool = True,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=num_tokens,
            temperature=like.temperature,
            top_p=like.top_p,
            seed=like.seed,
            ignore_eos=True,
            num_prompt_logprobs=1 if wants_scores else None,
        )
        self.wanted[name] = Wanted(prompt, num_tokens, like, wants_scores)
        self.tokens[name], self.scores[name] = [], []
        self._done[name] = asyncio.Event()
        request = Request(RequestId(name), TokenIds(prompt), sampling, 0.0)
        self._cluster.submit(request, self._deliver)

    def ask_for(self, wanted: dict[str, Wanted]) -> None:
        for name, one in wanted.items():
            self.ask(name, one.prompt, one.num_tokens, one.like, wants_scores=one.wants_scores)

    def _deliver(self, token: TokenOutput) -> None:
        self.scores[token.request_id] += [row for one in token.prompt_scores for row in one.rows()]
        if token.token_id is not None:
            if token.position == 0:
                self.num_cached[token.request_id] = token.num_cached_tokens
            self.tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            self._done[token.request_id].set()

    async def have(self, num_tokens: int) -> None:
        """Every answer has at least so many tokens."""
        async with asyncio.timeout(60.0):
            while not all(len(tokens) >= num_tokens for tokens in self.tokens.values()):
                await asyncio.sleep(0.005)

    async def all(self) -> "Answers":
        async with asyncio.timeout(90.0):
            await asyncio.gather(*(event.wait() for event in self._done.values()))
        return self


def run(
    config: KunServeConfig,
    vocab_size: int,
    story: Story,
    launcher: Launcher | None = None,
    measured: Measured | None = None,
) -> Answers:
    """Where nothing is measured, and tokens are guessed, all guesses are checked."""
    if measured is None:
        measured = Measured(FREE_ROWS if config.scheduler.speculative_config else None)

    async def main() -> Answers:
        cluster = await LocalCluster.start(
            Plan(config, measured), vocab_size=vocab_size, launcher=launcher or ForkingLauncher()
        )
        try:
            answers = Answers(cluster)
            await story(cluster, answers)
            await answers.all()
            totals = [instance.totals for instance in cluster.state().instances]
            answers.num_right_guesses = sum(one.num_accepted_tokens for one in totals)
            return answers
        finally:
            await cluster.close()

    return asyncio.run(main())


def config_of(
    model: str,
    dtype: str,
    num_instances: int,
    kv_bytes: int,
    granule_bytes: int = 8192,
    block_size: int = 8,
    lookahead: bool = True,
    device: str = "cpu",
    trace_out: str | None = None,
    guesses: bool = False,
    engine: str = "own",
) -> KunServeConfig:
    return KunServeConfig(
        model=ModelConfig(model=model, dtype=dtype),  # type: ignore[arg-type]
        instance=InstanceConfig(
            device=device,
            engine=engine,  # type: ignore[arg-type]
            kv_cache_memory_bytes=kv_bytes,
            block_size=BLOCKS[engine] * block_size,
            granule_bytes=granule_bytes,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=48,
            lookahead=lookahead,
            min_microbatch_tokens=8,
            speculative_config=SpeculativeConfig() if guesses else None,
        ),
        overload=OverloadConfig(policy="drop", restore_below=0.0),
        cluster=ClusterConfig(
            num_instances=num_instances, trace_out=trace_out, topology=str(SLOW_LINKS)
        ),
    )


SLOW_LINKS = Path(__file__).with_name("slow_links.toml")
PROMPTS = {
    f"r{i}": np.random.default_rng(i).integers(3, VOCAB, 5 + 13 * (i % 5)).tolist()
    for i in range(10)
}
NUM_TOKENS = {name: 40 + 8 * i for i, name in enumerate(PROMPTS)}
QUEUED = {
    f"q{i}": np.random.default_rng(100 + i).integers(3, VOCAB, 20 + 9 * (i % 8)).tolist()
    for i in range(16)
}
"""More than memory admits at once: what a pipeline looks ahead over."""
QUEUED_TOKENS = 12


async def restore_when_it_fits(cluster: LocalCluster) -> None:
    """A restore is postponed while the pipeline's KV would not fit: ask until it is done."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                await cluster.restore()
            except InvalidRequest:
                await asyncio.sleep(0.01)
            else:
                return


async def drop_to(cluster: LocalCluster, num_groups: int) -> None:
    """Overload may have dropped already, and who still exchanges takes no part: ask until done."""
    async with asyncio.timeout(60.0):
        while len(cluster.state().groups) > num_groups:
            try:
                await cluster.drop(None)
            except InvalidRequest:
                await asyncio.sleep(0.01)
