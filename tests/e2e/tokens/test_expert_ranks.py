"""Sparse models over ranks: what cannot be parted, whole experts or parts of each, is refused."""

import asyncio
from pathlib import Path

import pytest

from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.server.start import launch
from tests.e2e.tokens.test_tensor_parallel import open_ranks
from tests.tiny_models import save_tiny, tiny_model

NUM_LAYERS = 4


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
    tiny_model(kind, **changes).save_pretrained(tmp_path)
    instance = InstanceConfig(
        tensor_parallel_size=4, enable_expert_parallel=True, memory_bytes=4 << 20
    )
    config = KunServeConfig(model=ModelConfig(str(tmp_path), dtype="float32"), instance=instance)
    with pytest.raises(Begun if says is None else ConfigError, match=says):
        asyncio.run(launch.launch(config))
