"""Whatever computes them, tokens are equal through a drop, an exchange and a restore: those of
``transformers``, or of a cluster that nothing befell where weights or sampling are not its own.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.plan import Measured
from kunserve.engine.body import EngineBody
from tests.chrome_trace import Event, check_trace
from tests.direct_engine import DirectEngine, prepare_all
from tests.e2e.tokens.asked_cluster import (
    Answers,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.e2e.tokens.code_paths import PATHS, CodePath
from tests.e2e.tokens.test_device_identity import open_body
from tests.e2e.tokens.test_device_ranks import open_ranks as open_device_ranks
from tests.e2e.tokens.test_greedy_identity import SAVED_KINDS
from tests.e2e.tokens.test_kv_ring import RING
from tests.e2e.tokens.test_tensor_parallel import (
    HALVES,
    NUM_TOKENS,
    PROMPTS,
    WHOLE,
    open_ranks,
)
from tests.fakecuda.library import FakeCuda
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import (
    KINDS,
    VOCAB,
    greedy_after,
    prompt_logprobs,
    save_with_answers,
    tiny_model,
)


def check_dropped(path: CodePath, cluster: LocalCluster) -> None:
    """Of every layer one instance has the weights: the head goes with the last ones."""
    (group,) = cluster.state().groups
    held = [stage.layers for stage in group.stages]
    assert len(held) == path.num_instances
    assert [number for layers in held for number in range(*layers)] == list(range(path.num_layers))
    assert path.last_layers in (None, held[-1].num_layers)


async def tell(path: CodePath, cluster: LocalCluster, answers: Answers, folder: Path) -> None:
    """The story of all: requests, a drop, more of them, a restore."""
    assert not path.is_ring or cluster.limits.max_model_len == (6 + 2 * 18) * 8
    for wave in path.waves:
        if wave.num_groups is not None:
            await drop_to(cluster, wave.num_groups)
        if wave.num_groups == 1:
            check_dropped(path, cluster)
        answers.ask_for(wave.wanted)
        await answers.have(wave.have_tokens)
    if path.is_restored:
        await restore_when_it_fits(cluster)
        assert [len(group.stages) for group in cluster.state().groups] == [1] * path.num_instances
    await path.after(cluster, answers, folder)


def check_by_transformers(path: CodePath, answers: Answers) -> None:
    model = tiny_model(path.kind, path.num_layers)
    for name, want in answers.wanted.items():
        tokens = answers.tokens[name]
        assert len(tokens) == want.num_tokens, name
        assert tokens == greedy_after(model, want.prompt, tokens), name
        scores = [row.logprob for row in answers.scores[name]]
        expected = prompt_logprobs(model, want.prompt) if want.wants_scores else []
        assert scores == pytest.approx(expected, abs=1e-3), name


def check_by_calm(config: KunServeConfig, vocab_size: int, answers: Answers) -> None:
    """A cluster that nothing befalls, and that guesses nothing, says the same to the bit."""

    async def calm(cluster: LocalCluster, others: Answers) -> None:
        others.ask_for(answers.wanted)

    config = replace(config, scheduler=replace(config.scheduler, speculative_config=None))
    other = run(config, vocab_size, calm)
    assert answers.tokens == other.tokens
    assert answers.scores == other.scores
    assert not other.num_right_guesses
    for name, want in answers.wanted.items():
        assert len(answers.tokens[name]) == want.num_tokens, name
        assert len(answers.scores[name]) == len(want.prompt) - 1, name


@pytest.mark.timeout(300)  # up to four instances compute on however few cores there are
@pytest.mark.parametrize("path", PATHS)
def test_of_a_cluster(
    path: CodePath,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKECUDA_GRANULARITY_BYTES", "8192")
    config = path.config_in(tmp_path)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        await tell(path, cluster, answers, tmp_path)

    vocab_size = 49152 if path.is_pretrained else VOCAB
    measured = Measured(ring=RING) if path.is_ring else None
    answers = run(config, vocab_size, story, measured=measured)
    assert {name for wave in path.waves for name in wave.wanted} <= set(answers.tokens)
    if path.is_pretrained or path.quant is not None or path.dtype != "float32":
        check_by_calm(config, vocab_size, answers)
    else:
        check_by_transformers(path, answers)
    assert answers.num_right_guesses or not path.some_are_right
    if path.on_device:
        err = capfd.readouterr().err
        assert "hidden states go into the memory of" in err
        runs_ahead = path.num_ranks == 1 and not path.guesses
        assert ("feed on its last stage" in err) is runs_ahead
    assert max(answers.num_cached.values()) >= path.num_shared_tokens
    if path.is_traced:
        check_pipelined(check_trace(tmp_path / "trace.json"), path)


def check_pipelined(events: list[Event], path: CodePath) -> None:
    """Steps crossed all stages, and KV and layers were pulled."""
    arrows: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "microbatch":
            arrows[event["id"]].append(event["ph"])
    assert sum(len(points) == path.num_instances for points in arrows.values()) > 10
    assert {"KV", "layers"} <= {e["name"].split()[0] for e in events if e["ph"] == "i"}
    whole = [0, path.num_layers]
    sizes = [
        event["args"]["prompt_tokens"] + event["args"]["decodes"]
        for event in events
        if event["ph"] == "X" and event["args"].get("layers", whole) != whole
    ]
    assert max(sizes) <= 48 and (path.lookahead or max(sizes) == 48), "by tokens, steps are full"


@dataclass(frozen=True)
class Pair:
    """What two bodies compute with that have no scheduler and no processes but those of ranks."""

    kind: str
    open_body: Callable[[Path, int], EngineBody]
    rounds: tuple[tuple[str, int], ...] = (("disk", 16),)
    """Whence dropped layers come back, and the tokens of a chunk in what is computed then."""
    undropped_chunk_tokens: tuple[int, ...] = ()
    """In what one of them computes before anything is dropped."""
    changes: dict[str, object] = field(default_factory=dict)
    """Of the configuration of the model."""


def open_plain(folder: Path, number: int) -> EngineBody:
    config = InstanceConfig(memory_bytes=8 << 20, granule_bytes=8192, block_size=8)
    model = ModelConfig(model=str(folder), dtype="float32")
    return EngineBody(InstanceId(number), model, config)


def by_vllm(folder: Path, number: int) -> EngineBody:
    return open_engine(folder, number, "vllm")


def experts(kind: str, num_ranks: int, expert_parallel: bool, **changes: object) -> Pair:
    def opened(folder: Path, number: int) -> EngineBody:
        return open_ranks(folder, num_ranks, number, expert_parallel=expert_parallel)

    return Pair(kind, opened, (("disk", 1000),), (5,), changes)


def on_device_ranks(folder: Path, number: int) -> EngineBody:
    return open_device_ranks(folder, 2, number)


def on_ranks(folder: Path, number: int) -> EngineBody:
    return open_ranks(folder, 2, number)


TWICE = (("disk", 1000), ("peer", 5))
PAIRS = [
    *(pytest.param(Pair(kind, open_plain), id=kind) for kind in SAVED_KINDS),
    *(pytest.param(Pair(kind, open_body, TWICE, (1000,)), id=f"device-{kind}") for kind in KINDS),
    *(
        pytest.param(Pair(kind, by_vllm, TWICE, (1000,)), id=f"vllm-{kind}", marks=NEEDS_VLLM)
        for kind in (*KINDS, "gemma2", "phi3", "mixtral", "qwen3_moe")
    ),
    pytest.param(Pair("qwen3", on_ranks, TWICE), id="ranks-qwen3"),
    pytest.param(Pair("qwen3", on_device_ranks, TWICE, (1000,)), id="device-ranks-qwen3"),
    pytest.param(
        Pair("llama3", on_device_ranks, TWICE, (1000,)),
        id="device-ranks-llama3",
        marks=pytest.mark.slow,
    ),
    pytest.param(experts("qwen3_moe", 2, False), id="experts-parted-qwen3_moe"),
    # Of the shared expert each rank has a part.
    pytest.param(experts("qwen2_moe", 2, True, num_experts=8), id="experts-whole-qwen2_moe"),
    # Whose norms of q and k are over all heads, so over all ranks.
    pytest.param(experts("olmoe", 2, False), id="experts-parted-olmoe"),
    # Each KV head is two ranks'.
    pytest.param(experts("olmoe", 4, True, num_experts=12), id="experts-of-four-olmoe"),
    pytest.param(experts("mixtral", 2, True, num_local_experts=6), id="experts-whole-mixtral"),
]


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


@pytest.mark.parametrize("path", PAIRS)
def test_of_two_bodies(path: Pair, fake: FakeCuda, tmp_path: Path) -> None:
    """A pipeline of two and back; remaps with and without a preparation, some called off, some of
    those of a device refused by its driver at first.
    """
    folder, expected = save_with_answers(tmp_path, path.kind, PROMPTS, NUM_TOKENS, **path.changes)
    draw = random.Random(path.kind)
    with ExitStack() as stack:
        pair = [stack.enter_context(closing(path.open_body(folder, i))) for i in range(2)]

        def check_alone(body: EngineBody, chunk_tokens: int) -> None:
            engine = DirectEngine([(body, WHOLE)])
            assert engine.generate(PROMPTS, NUM_TOKENS, chunk_tokens) == expected

        for chunk_tokens in path.undropped_chunk_tokens:
            check_alone(pair[0], chunk_tokens)
        for source, chunk_tokens in path.rounds:
            for body, keep in zip(pair, HALVES, strict=True):
                if draw.random() < 0.7:
                    assert prepare_all(body.memory, keep) is None
                if draw.random() < 0.3:
                    assert prepare_all(body.memory, WHOLE) is None
                drop_half(body, keep)
            both = DirectEngine(list(zip(pair, HALVES, strict=True)))
            assert both.generate(PROMPTS, NUM_TOKENS, 16) == expected
            for body, missing in zip(pair, reversed(HALVES), strict=True):
                fill_kv(body)
                fake.refuse(draw.randrange(6))
                refusal = prepare_all(body.memory, WHOLE)
                fake.refuse_nothing()
                assert refusal is None or prepare_all(body.memory, WHOLE) is None
                back = missing if source == "disk" else WHOLE
                assert body.memory.reclaim(back).kv_units == body.spec.kv_units
                if source == "disk":
                    body.load_layers(missing)
            if source == "peer":
                move_layers(pair[0], pair[1], HALVES[0])
                move_layers(pair[1], pair[0], HALVES[1])
            for body in pair:
                body.check()
                check_alone(body, chunk_tokens)


def drop_half(body: EngineBody, keep: LayerRange) -> None:
    """Two of four layers go, and their memory is KV memory."""
    remap = body.memory.drop(keep)
    assert remap.kv_units == body.spec.units_when_holding(2) > body.spec.kv_units
    assert remap.moved_bytes >= body.spec.layer_bytes
    body.check()


def fill_kv(body: EngineBody) -> None:
    """Where dropped layers were is now something else, which a restore has to write over."""
    num_units = body.spec.units_when_holding(2)
    data = np.full(num_units * body.memory.unit_bytes, 0x3F, dtype=np.uint8)
    body.memory.write_units([(0, num_units)], data)


def move_layers(source: EngineBody, target: EngineBody, layers: LayerRange) -> None:
    """As a mover does: chunks that end anywhere."""
    chunk_bytes = 5000
    for layer in range(*layers):
        for offset in range(0, source.memory.layer_bytes, chunk_bytes):
            data = np.empty(min(chunk_bytes, source.memory.layer_bytes - offset), dtype=np.uint8)
            source.memory.read_layer(layer, offset, data)
            target.memory.write_layer(layer, offset, data)
