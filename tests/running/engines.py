"""Whose model classes compute: tests take both where the model allows, see ``make test-vllm``."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.body import EngineBody
from kunserve.engine.devices import open_backend
from kunserve.model.source import resolve_model

NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)"
)
ENGINES = ["own", pytest.param("vllm", marks=NEEDS_VLLM)]
BLOCKS = {"own": 1, "vllm": 4}
"""How many times as many tokens are in a block: vLLM's have 32 at least."""


def open_engine(
    folder: Path,
    number: int = 0,
    engine: str = "own",
    *,
    dtype: str = "float32",
    scheduler: SchedulerConfig | None = None,
    block_size: int = 8,
    **options: Any,
) -> EngineBody:
    """A body of its own, with blocks of as many of the tests' sizes as its engine needs."""
    model = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
    settings = {"memory_bytes": 8 << 20, "granule_bytes": 8192, **options}
    config = InstanceConfig(
        engine=engine,  # type: ignore[arg-type]
        block_size=BLOCKS[engine] * block_size,
        **settings,
    )
    source = resolve_model(str(folder))
    backend = open_backend(model, source, config, InstanceId(number))
    return EngineBody(InstanceId(number), model, config, source, scheduler, backend)
