"""Structured outputs of the real engine are the same whatever happens to the instances."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import FinishReason, Request, SamplingParams, StructuredOutput
from kunserve.core.tokens import TokenIds
from kunserve.engine.body import EngineBody
from kunserve.engine.sampling.structured.grammar import compile_form
from kunserve.engine.sampling.structured.vocabulary import open_vocabulary
from tests.direct_engine import DirectEngine
from tests.e2e.tokens.asked_cluster import config_of, drop_to, restore_when_it_fits
from tests.running.engines import ENGINES, open_engine
from tests.running.forking import ForkingLauncher
from tests.tiny_models import VOCAB, save_tiny, save_tokenizer

NUM_LAYERS = 4
WHOLE = LayerRange(0, NUM_LAYERS)
HALVES = (LayerRange(0, 2), LayerRange(2, NUM_LAYERS))
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "n": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}
FORMS = [
    StructuredOutput("json_schema", json.dumps(RECORDS)),
    StructuredOutput("regex", "[a-z]{3}(-[0-9]{2,5}){6,9}"),
    StructuredOutput("grammar", 'root ::= "(" root ")" | "x"'),
]
NUM_TOKENS = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of its own."""
    made = save_tiny(tmp_path_factory.mktemp("structured"), "llama", NUM_LAYERS)
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> LLTokenizer:
    return open_vocabulary((folder / "tokenizer.json").read_text(), VOCAB, [2])


@pytest.fixture(params=ENGINES)
def bodies(folder: Path, request: pytest.FixtureRequest) -> Iterator[list[EngineBody]]:
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    made = [open_engine(folder, i, request.param, scheduler=limits) for i in range(2)]
    yield made
    for body in made:
        body.close()


def prompts(num: int) -> list[list[int]]:
    return [
        np.random.default_rng(i).integers(3, 107, 4 + 11 * (i % 4)).tolist() for i in range(num)
    ]


def sampling_of(number: int, **options: object) -> SamplingParams:
    """Greedy, or drawn; each in a form."""
    return SamplingParams(
        NUM_TOKENS,
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        structured=FORMS[number % len(FORMS)],
        **options,  # type: ignore[arg-type]
    )


def check_form(vocabulary: LLTokenizer, form: StructuredOutput, tokens: list[int]) -> bool:
    """Whether the output is whole; it is in its form in any case."""
    matcher = compile_form(vocabulary, form)
    whole = 2 in tokens
    text = tokens[: tokens.index(2)] if whole else tokens
    assert matcher.consume_tokens(text), vocabulary.decode_str(tokens)
    assert matcher.is_accepting() or not whole
    return whole


def test_one_stage_and_two_say_the_same(bodies: list[EngineBody], vocabulary: LLTokenizer) -> None:
    many = [sampling_of(number) for number in range(6)] + [SamplingParams(NUM_TOKENS, 0.0)]
    given = prompts(len(many))
    one = DirectEngine([(bodies[0], WHOLE)]).generate(given, 30, 16, many)
    for body, layers in zip(bodies, HALVES, strict=True):
        body.memory.drop(layers)
    two = DirectEngine(list(zip(bodies, HALVES, strict=True))).generate(given, 30, 5, many)
    # Direct engines know no end: what follows it is nobody's.
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        end = first.index(2) if 2 in first else len(first)
        assert first[:end] == second[:end], number
        if number < 6:
            check_form(vocabulary, FORMS[number % 3], first[: end + 1])


class Clients:
    """Asks for structured outputs and collects them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def ask(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.tokens[name] = []
        request = Request(RequestId(name), TokenIds(prompt), sampling, 0.0)
        self._cluster.submit(request, self._deliver)

    def _deliver(self, token: TokenOutput) -> None:
        if token.token_id is not None:
            assert token.position == len(self.tokens[token.request_id]), token
            self.tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            self.ends[token.request_id] = token.finish_reason

    async def until(self, num_tokens: int | None = None) -> None:
        """All have so many tokens or have ended."""
        async with asyncio.timeout(90.0):
            while not all(
                name in self.ends or (num_tokens is not None and len(tokens) >= num_tokens)
                for name, tokens in self.tokens.items()
            ):
                await asyncio.sleep(0.003)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_through_preemptions_a_drop_a_restore_and_a_death(
    folder: Path, vocabulary: LLTokenizer, engine: str
) -> None:
    unit_bytes = 2 * 8 * 2 * 32 * 4
    kv_bytes = 24 * NUM_LAYERS * unit_bytes
    config = config_of(str(folder), "float32", 2, kv_bytes, engine=engine)
    config = replace(config, cluster=replace(config.cluster, check_invariants=True))
    given = prompts(9)

    async def story() -> tuple[Clients, Clients, Clients]:
        cluster = await LocalCluster.start(
            Plan(config), vocab_size=VOCAB, launcher=ForkingLauncher()
        )
        try:
            calm, wild = Clients(cluster), Clients(cluster)
            for number in range(9):
                calm.ask(f"r{number}", given[number], sampling_of(number))
                await calm.until()
            few = Clients(cluster)
            for number in range(3):  # whose KV fits two instances at once
                few.ask(f"f{number}", given[number], sampling_of(number))
            await few.until(3)
            await drop_to(cluster, 1)
            await few.until(10)
            await restore_when_it_fits(cluster)
            await few.until()
            for number in range(9):
                wild.ask(f"w0 {number}", given[number], sampling_of(number))
            await wild.until(3)
            await drop_to(cluster, 1)
            await wild.until(6)
            for wave in range(1, 9):  # one that the death meets: a busy machine may end all here
                if len(wild.ends) < len(wild.tokens):
                    break
                for number in range(9):
                    wild.ask(f"w{wave} {number}", given[number], sampling_of(number))
                await wild.until(3)
            assert len(wild.ends) < len(wild.tokens)
            await cluster.kill(InstanceId(0))
            await wild.until()
            return calm, few, wild
        finally:
            await cluster.close()

    calm, few, wild = asyncio.run(story())
    for number in range(3):
        assert calm.tokens[f"r{number}"] == few.tokens[f"f{number}"], number
    for name, tokens in wild.tokens.items():
        number = name.split()[1]
        assert calm.tokens[f"r{number}"] == tokens, name
        assert calm.ends[f"r{number}"] == wild.ends[name]
    for number in range(9):
        first = calm.tokens[f"r{number}"]
        whole = check_form(vocabulary, FORMS[number % 3], first)
        assert calm.ends[f"r{number}"] == (FinishReason.STOP if whole else FinishReason.LENGTH)
    assert FinishReason.STOP in calm.ends.values()
