"""Drops and restores at random moments under load: every answer is that of a calm cluster.

    python -m benchmarks.faults.random_drops --engine vllm --model FOLDER [--dtype bfloat16]

Two real instances serve requests, some greedy and some drawn with seeds, of one to a few hundred
tokens, part of them with a common beginning. They are dropped to one pipeline and restored again
by force, at moments drawn by chance. The same requests were served before by a cluster that never
drops. Prints the counts as a line of JSON; the exit code is 1 if any token differs.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.log_format import start_logging
from kunserve.core.config import (
    MIB,
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.model.config import read_spec
from kunserve.model.source import resolve_model

PATIENCE_S = 120.0
"""How long a change, or an answer, may take."""
LONGEST_PAUSE_S = 0.6
"""Between two changes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request."""

    prompt: list[int]
    sampling: SamplingParams


def make_requests(num: int, vocab_size: int, draw: random.Random) -> list[Wanted]:
    """Every third one begins as the others of its kind do; every second one is drawn."""
    common = [draw.randrange(100, vocab_size) for _ in range(150)]
    found = []
    for number in range(num):
        prompt = [draw.randrange(100, vocab_size) for _ in range(draw.randrange(1, 300))]
        if number % 3 == 0:
            prompt = common + prompt[:60]
        sampling = SamplingParams(
            max_tokens=draw.randrange(8, 96),
            temperature=0.9 if number % 2 else 0.0,
            top_p=0.95,
            seed=number,
            ignore_eos=True,
        )
        found.append(Wanted(prompt, sampling))
    return found


@dataclass
class Answers:
    """Keeps requests in flight, and collects what is said."""

    cluster: LocalCluster
    wanted: list[Wanted]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)

    def _deliver(self, token: TokenOutput) -> None:
        if token.token_id is not None:
            self.tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            self._ended[token.request_id].set()

    async def ask(self, number: int, turn: int) -> None:
        """One request to its end."""
        name, one = f"{number}-{turn}", self.wanted[number]
        self.tokens[name], self._ended[name] = [], asyncio.Event()
        request = Request(RequestId(name), TokenIds(one.prompt), one.sampling, time.monotonic())
        self.cluster.submit(request, self._deliver)
        async with asyncio.timeout(PATIENCE_S):
            await self._ended[name].wait()


async def calm(cluster: LocalCluster, wanted: list[Wanted], streams: int) -> dict[str, list[int]]:
    """Everything once, so many at a time."""
    answers, numbers = Answers(cluster, wanted), iter(range(len(wanted)))

    async def stream() -> None:
        for number in numbers:
            await answers.ask(number, 0)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return answers.tokens


async def storm(
    cluster: LocalCluster, wanted: list[Wanted], streams: int, drops: int, draw: random.Random
) -> tuple[dict[str, list[int]], Counter[str]]:
    """The same, again and again, until there were so many drops."""
    answers, counts, turns = Answers(cluster, wanted), Counter[str](), Counter[int]()
    over = asyncio.Event()

    async def stream() -> None:
        while not over.is_set():
            number = draw.randrange(len(wanted))
            turns[number] += 1
            await answers.ask(number, turns[number])

    streaming = [asyncio.create_task(stream()) for _ in range(streams)]
    try:
        while counts["drops"] < drops:
            for kind in ("drops", "restores"):
                await asyncio.sleep(draw.uniform(0.0, LONGEST_PAUSE_S))
                counts["refused"] += await change(cluster, kind)
                counts[kind] += 1
            for task in streaming:
                if task.done():
                    task.result()
            if counts["drops"] % 10 == 0:
                print(f"{counts['drops']} drops, {len(answers.tokens)} answers", file=sys.stderr)
    finally:
        over.set()
    await asyncio.gather(*streaming)
    return answers.tokens, counts


async def change(cluster: LocalCluster, kind: str) -> int:
    """Ask until it is done; how often it was refused because it did not fit just then."""
    refused = 0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await (cluster.drop(None) if kind == "drops" else cluster.restore())
            except InvalidRequest:
                refused += 1
                await asyncio.sleep(0.02)
            else:
                return refused


async def run(options: argparse.Namespace) -> int:
    """A calm cluster, then one in a storm; the exit code."""
    draw = random.Random(options.seed)
    spec = read_spec(resolve_model(options.model), options.dtype, computed_elsewhere=True)
    wanted = make_requests(options.requests, spec.vocab_size, draw)
    config = KunServeConfig(
        model=ModelConfig(model=options.model, dtype=options.dtype),
        cluster=ClusterConfig(num_instances=2),
        instance=InstanceConfig.of_device(
            "cpu",
            engine=options.engine,
            kv_cache_memory_bytes=options.kv_mib * MIB,
            num_threads=options.threads,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=256),
        overload=OverloadConfig(policy="recompute"),
    )
    cluster = await LocalCluster.start(Plan(config, Measured()), vocab_size=spec.vocab_size)
    try:
        expected = await calm(cluster, wanted, options.streams)
    finally:
        await cluster.close()
    config = replace(config, overload=OverloadConfig(policy="drop", restore_below=0.0))
    cluster = await LocalCluster.start(Plan(config, Measured()), vocab_size=spec.vocab_size)
    try:
        said, counts = await storm(cluster, wanted, options.streams, options.drops, draw)
        state = cluster.state()
    finally:
        await cluster.close()
    different = [name for name, one in said.items() if one != expected[f"{name.split('-')[0]}-0"]]
    done = [one for one in state.transitions if one.outcome == "done"]
    result = {
        "engine": options.engine,
        "dtype": options.dtype,
        "answers": len(said),
        "tokens": sum(map(len, said.values())),
        "different": len(different),
        **counts,
        "drops_in_all": state.num_drops,
        "deaths": state.num_deaths,
        "remap_ms_most": round(1e3 * max((one.remap_s for one in done), default=0.0), 2),
        "moved_mib": round(sum(one.moved_bytes for one in done) / MIB, 1),
    }
    print(json.dumps(result))
    return int(bool(different) or not said)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="own", choices=("own", "vllm"))
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--drops", type=int, default=100)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-mib", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_logging(KunServeConfig().log)
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
