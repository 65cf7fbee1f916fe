"""Sparse models over ranks: each has a part of every expert, or some whole ones."""

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.layout import LayerRange
from kunserve.server.start import launch
from tests.direct_engine import DirectEngine
from tests.e2e.tokens.test_tensor_parallel import HALVES, NUM_TOKENS, PROMPTS, WHOLE, open_ranks
from tests.tiny_models import expected_tokens, save_tiny, tiny_model

NUM_LAYERS = 4


@pytest.mark.parametrize(
    ("kind", "changes", "num_ranks", "expert_parallel"),
    [
        ("qwen3_moe", {}, 2, False),
        ("qwen2_moe", {"num_experts": 8}, 2, True),  # of the shared expert each has a part
        ("olmoe", {}, 2, False),  # whose norms of q and k are over all heads, so over all ranks
        ("olmoe", {"num_experts": 12}, 4, True),  # and here each KV head is two ranks'
        ("mixtral", {"num_local_experts": 6}, 2, True),
    ],
)
def test_tokens_of_transformers_through_a_drop_and_a_restore(
    tmp_path: Path, kind: str, changes: dict[str, object], num_ranks: int, expert_parallel: bool
) -> None:
    model = tiny_model(kind, NUM_LAYERS, **changes)
    model.save_pretrained(tmp_path)
    expected = [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with ExitStack() as stack:
        pair = [
            stack.enter_context(
                closing(open_ranks(tmp_path, num_ranks, number, expert_parallel=expert_parallel))
            )
            for number in range(2)
        ]
        alone = DirectEngine([(pair[0], WHOLE)])
        for chunk_size in (1000, 5):
            assert alone.generate(PROMPTS, NUM_TOKENS, chunk_size) == expected
        for body, keep in zip(pair, HALVES, strict=True):
            assert body.memory.prepare(keep) is None
            body.memory.drop(keep)
        both = DirectEngine(list(zip(pair, HALVES, strict=True)))
        assert both.generate(PROMPTS, NUM_TOKENS, 16) == expected
        body, missing = pair[0], HALVES[1]
        body.memory.reclaim(WHOLE)
        body.load_layers(missing)
        body.check()
        alone = DirectEngine([(body, LayerRange(0, NUM_LAYERS))])
        assert alone.generate(PROMPTS, NUM_TOKENS, 1000) == expected


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expert_parallel", "says"),
    [
        ("qwen3", 2, True, "has no experts"),
        ("qwen3_moe", 2, True, "has 7 experts, which it does not divide"),
        ("qwen3_moe", 1, True, "needs --tensor-parallel-size of 2 or more"),
        ("qwen3_moe", 4, False, "or whole experts: --enable-expert-parallel"),
    ],
)
def test_what_cannot_be_parted_is_refused_before_weights_are_read(
    tmp_path: Path, kind: str, num_ranks: int, expert_parallel: bool, says: str
) -> None:
    save_tiny(tmp_path, kind)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(ConfigError, match=says):
        open_ranks(tmp_path, num_ranks, expert_parallel=expert_parallel)


class Begun(Exception):
    """All checks have passed."""


@pytest.mark.parametrize(
    ("kind", "says"),
    [("qwen3", "has no experts"), ("qwen3_moe", None), ("olmoe", "has 11 experts")],
)
def test_the_front_looks_at_the_parts_that_ranks_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, says: str | None
) -> None:
    """Whole experts go over four ranks here, and no part of one would."""

    def begin(*args: object) -> None:
        raise Begun

    monkeypatch.setattr(launch, "_launcher", begin)
    changes = {"num_experts": 8} if says is None else {}
    tiny_model(kind, **changes).save_pretrained(tmp_path)  # type: ignore[arg-type]
    instance = InstanceConfig(
        tensor_parallel_size=4, enable_expert_parallel=True, memory_bytes=4 << 20
    )
    config = KunServeConfig(model=ModelConfig(str(tmp_path), dtype="float32"), instance=instance)
    with pytest.raises(Begun if says is None else ConfigError, match=says):
        asyncio.run(launch.launch(config))
