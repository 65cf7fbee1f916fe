"""Greedy tokens in float32 are those of transformers for every architecture and any batching."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.decoder import LOGIT_ROWS
from tests.direct_engine import DirectEngine
from tests.running.engines import ENGINES, open_engine
from tests.tiny_models import KINDS, VOCAB, expected_tokens, tiny_model
from tests.unit.engine.reference_attention import ReferenceBackend

NUM_LAYERS = 4
NUM_TOKENS = 12
PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB, length).tolist() for length in (1, 7, 33, 60)
]


SAVED_KINDS = (*KINDS, "olmoe")


@pytest.fixture(scope="module", params=SAVED_KINDS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A model folder, and what transformers generates from it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, NUM_LAYERS)
    model.save_pretrained(folder)
    return folder, [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, saved: tuple[Path, list[list[int]]]) -> str:
    """Whose model classes compute."""
    return str(request.param)


@contextmanager
def bodies(
    folder: Path, num: int = 1, engine: str = "own", **options: object
) -> Iterator[list[EngineBody]]:
    with ExitStack() as stack:
        made = [
            stack.enter_context(closing(open_engine(folder, i, engine, **options)))
            for i in range(num)
        ]
        yield made
        for body in made:
            body.check()


@pytest.mark.parametrize(("chunk_size", "turn"), [(1000, 0), (5, 1), (16, 0)])
def test_batches_chunks_and_blocks_change_nothing(
    saved: tuple[Path, list[list[int]]],
    engine: str,
    chunk_size: int,
    turn: int,
    request: pytest.FixtureRequest,
) -> None:
    """Any two of a kind, a size of chunks and one of blocks meet; in half the cases all do."""
    folder, expected = saved
    block_size = (8, 16)[(SAVED_KINDS.index(request.node.callspec.params["saved"]) + turn) % 2]
    with bodies(folder, engine=engine, block_size=block_size) as (body,):
        whole = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
        assert whole.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected


def test_guesses_change_nothing(saved: tuple[Path, list[list[int]]], engine: str) -> None:
    folder, expected = saved
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]

    def guess(tokens: list[int], num_right: int) -> list[int]:
        """Three of the tokens that will come, all wrong but the first ones."""
        (text,) = [text for text in texts if text[: len(tokens)] == tokens] or [[]]
        coming = text[len(tokens) : len(tokens) + 3]
        return [*coming[:num_right], *((one + 1) % VOCAB for one in coming[num_right:])]

    with bodies(folder, engine=engine) as (body,):
        for num_right in (0, 2, 3):
            whole = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
            guess_some = partial(guess, num_right=num_right)
            assert whole.generate(PROMPTS, NUM_TOKENS, guess=guess_some) == expected
            steps = -(-(NUM_TOKENS - 1) // (1 + num_right))
            assert whole.step_id == len(PROMPTS) + steps


def test_the_reference_attention_agrees(saved: tuple[Path, list[list[int]]]) -> None:
    folder, expected = saved
    config = InstanceConfig(memory_bytes=8 << 20, granule_bytes=8192, block_size=8)
    model = ModelConfig(model=str(folder), dtype="float32")
    with closing(EngineBody(InstanceId(0), model, config, backend=ReferenceBackend())) as body:
        whole = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
        assert whole.generate(PROMPTS, NUM_TOKENS, 16) == expected


def test_uneven_stages_and_layers_from_a_peer(
    saved: tuple[Path, list[list[int]]], engine: str
) -> None:
    folder, expected = saved
    ranges = [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]
    with bodies(folder, 3, engine) as three:
        for body, keep in zip(three, ranges, strict=True):
            body.memory.drop(keep)
        stages = DirectEngine(list(zip(three, ranges, strict=True)))
        assert stages.generate(PROMPTS, NUM_TOKENS, 7) == expected
        first, middle, _ = three
        first.memory.reclaim(LayerRange(0, 3))
        for layer in (1, 2):
            first.memory.layer_view(layer)[:] = middle.memory.layer_view(layer)
        two = DirectEngine([(first, LayerRange(0, 3)), (three[2], ranges[2])])
        assert two.generate(PROMPTS, NUM_TOKENS, 7) == expected


def test_sampling_does_not_depend_on_batching_or_stages(
    saved: tuple[Path, list[list[int]]], engine: str
) -> None:
    folder, _ = saved
    params = [
        SamplingParams(100, seed=1),
        SamplingParams(100, temperature=0.7, top_p=0.8, seed=2, num_logprobs=2),
        SamplingParams(100, top_k=5, frequency_penalty=0.5, repetition_penalty=1.3, seed=3),
        SamplingParams(100, min_p=0.1, presence_penalty=0.3, seed=4),
    ]
    with bodies(folder, 2, engine) as pair:
        whole = DirectEngine([(pair[0], LayerRange(0, NUM_LAYERS))])
        alone = [
            whole.generate([prompt], NUM_TOKENS, 1000, [one])[0]
            for prompt, one in zip(PROMPTS, params, strict=True)
        ]
        assert whole.generate(PROMPTS, NUM_TOKENS, 5, params) == alone
        stages = [(pair[0], LayerRange(0, 3)), (pair[1], LayerRange(3, 4))]
        for body, keep in stages:
            body.memory.drop(keep)
        assert DirectEngine(stages).generate(PROMPTS, NUM_TOKENS, 16, params) == alone


def test_scores_of_a_prompt_are_those_of_transformers_however_it_is_cut(
    saved: tuple[Path, list[list[int]]], engine: str
) -> None:
    folder, _ = saved
    prompt = [(37 * i + i * i) % (VOCAB - 3) + 3 for i in range(2 * LOGIT_ROWS + 5)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    asking = SamplingParams(100, temperature=0.0, num_prompt_logprobs=3)
    with bodies(folder, 2, engine) as pair:
        whole = DirectEngine([(pair[0], LayerRange(0, NUM_LAYERS))])
        plain = whole.generate([prompt], 2)
        assert whole.generate([prompt], 2, 1000, asking) == plain
        scores = whole.last[0].scores
        assert len(scores) == len(prompt) - 1
        for position, score in enumerate(scores):
            row = expected[position]
            target = float(row[prompt[position + 1]])
            assert score.logprob == pytest.approx(target, abs=1e-4)
            assert score.rank == int((row > target).sum()) + 1
            top = torch.topk(row, 3)
            assert [token for token, _ in score.top] == top.indices.tolist()
            assert [one for _, one in score.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        # The same bits, among others too.
        for chunk_size in (LOGIT_ROWS, 7):
            assert whole.generate([PROMPTS[0], prompt], 2, chunk_size, asking)[1:] == plain
            assert whole.last[1].scores == scores
        stages = [(pair[0], LayerRange(0, 3)), (pair[1], LayerRange(3, 4))]
        for body, keep in stages:
            body.memory.drop(keep)
        pipeline = DirectEngine(stages)
        assert pipeline.generate([prompt], 2, 16, asking) == plain
        assert pipeline.last[0].scores == scores


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["llama", "llama3", "mistral"])
def test_one_file_or_shards(kind: str, engine: str, tmp_path: Path) -> None:
    model: transformers.PreTrainedModel = tiny_model(kind, NUM_LAYERS)
    model.save_pretrained(tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with bodies(tmp_path, engine=engine) as (body,):
        whole = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
        expected = [expected_tokens(model, PROMPTS[1], NUM_TOKENS)]
        assert whole.generate(PROMPTS[1:2], NUM_TOKENS) == expected
