"""The real engine in real processes: a tiny float32 model's tokens are those of transformers,
and SmolLM2's those of an undisturbed run, through drops, exchanges, restores and preemptions.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import Launcher, LocalLauncher
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
from kunserve.engine.torch.cuda.cards import STAND_IN
from tests.chrome_trace import Event, check_trace
from tests.fakecuda.library import build
from tests.running.forking import ForkingLauncher
from tests.tiny_models import VOCAB, greedy_after, prompt_logprobs, tiny_model

Story = Callable[[LocalCluster, "Answers"], Awaitable[None]]
FREE_ROWS = CostCoefficients(attention_s=0.0, token_s=1e-9, chunk_s=1e-3, shared_s=1e-3)
"""What schedulers believe of steps, so that they check all guesses."""
SEEDED = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.95, seed=7)


class Answers:
    """Asks, and collects the tokens of every answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
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
        self.tokens[name], self.scores[name] = [], []
        self._done[name] = asyncio.Event()
        request = Request(RequestId(name), tuple(prompt), sampling, 0.0)
        self._cluster.submit(request, self._deliver)

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
) -> KunServeConfig:
    return KunServeConfig(
        model=ModelConfig(model=model, dtype=dtype),  # type: ignore[arg-type]
        instance=InstanceConfig(
            device=device,
            kv_cache_memory_bytes=kv_bytes,
            block_size=block_size,
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


async def drop_beside_decodes(cluster: LocalCluster, answers: Answers, traces: Path) -> None:
    """Until the traces show that KV was pulled.

    While this process stands still on a busy machine, whoever had KV may end or be preempted.
    """
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    async with asyncio.timeout(120.0):
        for number in count():
            if any('"KV from' in file.read_text() for file in traces.glob("trace*")):
                return
            for which in range(2):
                answers.ask(f"x{number}-{which}", PROMPTS["r0"], 150, greedy)
            await answers.have(1)
            await drop_to(cluster, 1)
            await restore_when_it_fits(cluster)


@pytest.mark.timeout(300)  # up to four instances compute on however few cores there are
@pytest.mark.parametrize(
    ("kind", "num_layers", "num_instances", "lookahead"),
    [
        ("qwen2", 5, 2, False),
        ("llama", 9, 4, True),
        pytest.param("qwen3_moe", 4, 2, True, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers_through_everything(
    kind: str, num_layers: int, num_instances: int, lookahead: bool, tmp_path: Path
) -> None:
    model = tiny_model(kind, num_layers)
    model.save_pretrained(tmp_path)
    unit_bytes = 2 * 8 * model.config.num_key_value_heads * 32 * 4
    kv_bytes = 24 * num_layers * unit_bytes  # 192 tokens per instance: some are preempted
    trace = tmp_path / "trace.json"
    config = config_of(
        str(tmp_path), "float32", num_instances, kv_bytes,
        lookahead=lookahead, trace_out=str(trace), guesses=not lookahead,
    )  # fmt: skip

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        names = list(PROMPTS)
        for name in names[:6]:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], greedy)
        await answers.have(3)
        await drop_to(cluster, num_instances - 1)
        for name in names[6:]:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], greedy)
        await drop_to(cluster, 1)
        (group,) = cluster.state().groups
        assert group.stages[-1].layers.num_layers == num_layers // num_instances, "head and all"
        for name, prompt in QUEUED.items():
            answers.ask(name, prompt, QUEUED_TOKENS, greedy)
        await answers.have(10)
        await restore_when_it_fits(cluster)
        assert len(cluster.state().groups) == num_instances
        await drop_beside_decodes(cluster, answers, tmp_path)

    answers = run(config, VOCAB, story)
    for name, prompt in (PROMPTS | QUEUED).items():
        assert len(answers.tokens[name]) == NUM_TOKENS.get(name, QUEUED_TOKENS)
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
        scores = [row.logprob for row in answers.scores[name]]
        assert scores == pytest.approx(prompt_logprobs(model, prompt), abs=1e-3), name
    check_pipelined(check_trace(trace), num_layers, num_instances, lookahead)


def test_so_they_are_over_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the driver: processes of their own, a drop, an exchange, a restore."""
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", "8192")
    model = tiny_model("qwen3", 5)
    model.save_pretrained(tmp_path)
    kv_bytes = 24 * 5 * 2 * 8 * 2 * 32 * 4
    config = config_of(
        str(tmp_path), "float32", 2, kv_bytes, device=STAND_IN + build(), guesses=True
    )
    early, late = list(PROMPTS)[:4], list(QUEUED)[:3]

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        for name in early:
            answers.ask(name, PROMPTS[name], 24, greedy)
        await answers.have(1)
        await drop_to(cluster, 1)
        for name in late:
            answers.ask(name, QUEUED[name], QUEUED_TOKENS, greedy)
        await restore_when_it_fits(cluster)

    answers = run(config, VOCAB, story)
    for name, prompt in (PROMPTS | QUEUED).items():
        if name in answers.tokens:
            assert len(answers.tokens[name]) == (24 if name in early else QUEUED_TOKENS)
            assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
    assert set(answers.tokens) == {*early, *late}
    assert answers.num_right_guesses


def check_pipelined(events: list[Event], num_layers: int, num_stages: int, lookahead: bool) -> None:
    """Steps crossed all stages, and KV and layers were pulled."""
    arrows: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "microbatch":
            arrows[event["id"]].append(event["ph"])
    assert sum(len(points) == num_stages for points in arrows.values()) > 10
    assert {"KV", "layers"} <= {e["name"].split()[0] for e in events if e["ph"] == "i"}
    sizes = [
        event["args"]["prompt_tokens"] + event["args"]["decodes"]
        for event in events
        if event["ph"] == "X" and event["args"].get("layers", [0, num_layers]) != [0, num_layers]
    ]
    assert max(sizes) <= 48 and (lookahead or max(sizes) == 48), "by tokens, steps are full"


def test_smollm2_says_the_same_through_a_drop_and_a_restore_even_in_bfloat16() -> None:
    """And with guesses as without."""
    config = config_of("smollm2-135m", "bfloat16", 2, 64 << 20, 256 * 1024, 16)
    guessing = replace(
        config, scheduler=replace(config.scheduler, speculative_config=SpeculativeConfig())
    )
    prompts = {
        f"r{i}": np.random.default_rng(i).integers(100, 30000, 40 + 30 * i).tolist()
        for i in range(5)
    }

    def ask_all(answers: Answers) -> None:
        for i, (name, prompt) in enumerate(prompts.items()):
            like = SEEDED if i % 2 else SamplingParams(max_tokens=1, temperature=0.0)
            answers.ask(name, prompt, 48, like)

    async def undisturbed(cluster: LocalCluster, answers: Answers) -> None:
        ask_all(answers)
        answers.ask("late", prompts["r4"][::-1], 4, SEEDED)

    async def disturbed(cluster: LocalCluster, answers: Answers) -> None:
        ask_all(answers)
        await answers.have(5)
        await cluster.drop(None)
        answers.ask("late", prompts["r4"][::-1], 4, SEEDED)
        await answers.have(4)
        await restore_when_it_fits(cluster)

    one = run(guessing, 49152, disturbed, LocalLauncher())
    other = run(config, 49152, undisturbed)
    assert one.tokens == other.tokens
    assert one.num_right_guesses and not other.num_right_guesses
    assert one.scores == other.scores
    assert all(len(one.scores[name]) == len(prompt) - 1 for name, prompt in prompts.items())
