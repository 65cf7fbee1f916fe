"""Bodies over one copy of the weights: the same bytes and the same tokens as over their own."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.backend import CpuBackend, weights_in
from kunserve.engine.body import EngineBody
from kunserve.engine.layer_weights import LayerWeights
from kunserve.engine.memory.weights_file import SharedWeights
from kunserve.engine.weights.readers import SafetensorsReader
from kunserve.model.source import resolve_model
from kunserve_extras.ranks.backend import RankedBackend
from tests.direct_engine import DirectEngine
from tests.extras.ranks.forked_ranks import fork_member
from tests.tiny_gguf import write_gguf
from tests.tiny_models import save_with_answers, tiny_model

NUM_LAYERS, NUM_TOKENS = 4, 8
WHOLE = LayerRange(0, NUM_LAYERS)
PROMPTS = [[3, 4, 5], list(range(3, 43)), [7]]
CONFIG = InstanceConfig(memory_bytes=4 << 20, granule_bytes=8192, block_size=8)
Files = Callable[[int], tuple[int, ...]]


@pytest.fixture
def files() -> Iterator[Files]:
    with ExitStack() as stack:

        def make(num: int) -> tuple[int, ...]:
            fds = tuple(os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(num))
            for fd in fds:
                stack.callback(os.close, fd)
            return fds

        yield make


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return save_with_answers(tmp_path_factory.mktemp("llama3"), "llama3", PROMPTS, NUM_TOKENS)


def open_body(
    path: Path,
    number: int = 0,
    fds: tuple[int, ...] = (),
    num_ranks: int = 1,
    num_sharers: int = 2,
    dtype: str = "float32",
    **names: str,
) -> EngineBody:
    """With its own weights where there are no files."""
    model = ModelConfig(model=str(path), dtype=dtype, quantization="auto")  # type: ignore[arg-type]
    source = resolve_model(str(path))
    config = replace(
        CONFIG,
        tensor_parallel_size=num_ranks,
        weight_sharers=num_sharers if fds else 0,
        bears_weights=number < num_sharers,
    )
    shared = SharedWeights(fds, {"model_files": "abc"} | names) if fds else None
    backend: CpuBackend | RankedBackend = CpuBackend(shared)
    if num_ranks > 1:
        backend = RankedBackend(model, source, num_ranks, fork_member, shared=shared)
    return EngineBody(InstanceId(number), model, config, source, None, backend)


def checksums(body: EngineBody) -> dict[str, str]:
    """Of each tensor; between them lies whatever lay there before."""
    weights = weights_in(body.memory.shards[0], body.model, CpuBackend.device, in_panels=True)
    named = {"embedding": weights.embedding, "norm": weights.final_norm, "head": weights.head}
    for number, layer in enumerate(weights.layers):
        named |= {f"{number}.{name}": getattr(layer, name) for name in LayerWeights.__slots__}
    tensors = {name: getattr(one, "data", one) for name, one in named.items() if one is not None}
    return {name: hashlib.sha256(bytes_of(one)).hexdigest() for name, one in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def generate(body: EngineBody) -> list[list[int]]:
    return DirectEngine([(body, WHOLE)]).generate(PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_of_transformers(
    saved: tuple[Path, list[list[int]]], files: Files, num_ranks: int
) -> None:
    folder, expected = saved
    fds = files(num_ranks)
    with ExitStack() as stack:
        own = stack.enter_context(closing(open_body(folder, 0, num_ranks=num_ranks)))
        bodies = [
            stack.enter_context(closing(open_body(folder, number, fds, num_ranks)))
            for number in range(3)
        ]
        weights_bytes = num_ranks * own.memory.shards[0].weights_bytes
        for body in bodies:
            assert generate(body) == generate(own) == expected
            body.check()
            spec = body.spec
            assert spec.shared_weights_bytes == weights_bytes
            borne = own.spec.memory_bytes - spec.memory_bytes
            assert (
                abs(borne - (spec.instance_id >= 2) * weights_bytes // 2) <= 2 * spec.granule_bytes
            )
            more = (spec.kv_units - own.spec.kv_units) * spec.unit_bytes
            assert abs(more - weights_bytes // 2) <= 2 * spec.granule_bytes
            assert spec.units_when_holding(1) == spec.kv_units, "nothing to drop"
            arena_bytes = spec.memory_bytes - (spec.shared_weights_bytes - spec.borrowed_bytes)
            assert arena_bytes <= spec.kv_units * spec.unit_bytes + spec.granule_bytes
            assert "MiB shared, KV" in str(body.account)


def test_tensors_are_those_of_private_weights(
    saved: tuple[Path, list[list[int]]], files: Files
) -> None:
    folder, _ = saved
    fds = files(1)
    with (
        closing(open_body(folder, dtype="bfloat16")) as own,
        closing(open_body(folder, 0, fds, dtype="bfloat16")) as one,
        closing(open_body(folder, 1, fds, dtype="bfloat16")) as other,
    ):
        assert len(checksums(own)) > 4 * NUM_LAYERS
        assert checksums(one) == checksums(other) == checksums(own)


def test_quantised_weights(tmp_path: Path, files: Files) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3", NUM_LAYERS), "qwen3", Quant.Q8_0)
    fds = files(1)
    with (
        closing(open_body(path)) as own,
        closing(open_body(path, 0, fds)) as one,
        closing(open_body(path, 1, fds)) as other,
    ):
        assert one.model.packed is not None
        assert checksums(one) == checksums(other) == checksums(own)
        assert generate(one) == generate(other) == generate(own)


def test_who_comes_later_reads_nothing(
    saved: tuple[Path, list[list[int]]], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved
    fds = files(1)
    with closing(open_body(folder, 0, fds)):

        def read(*_: object) -> None:
            raise AssertionError("it reads the model's files")

        monkeypatch.setattr(SafetensorsReader, "read", read)
        monkeypatch.setattr(SafetensorsReader, "check", read)
        with closing(open_body(folder, 1, fds)) as later:
            assert generate(later) == expected


def test_what_decides_about_the_bytes_must_be_alike(
    saved: tuple[Path, list[list[int]]], files: Files
) -> None:
    folder, _ = saved
    fds = files(1)
    with closing(open_body(folder, 0, fds)):
        with pytest.raises(ConfigError, match="another dtype: float32, not bfloat16"):
            open_body(folder, 1, fds, dtype="bfloat16")
        with pytest.raises(ConfigError, match="another model_files: abc, not def"):
            open_body(folder, 1, fds, model_files="def")
    ranks = files(2)
    with (
        closing(open_body(folder, 0, ranks, 2)),
        pytest.raises(ConfigError, match="another rank: 1 of 2, not 0 of 2"),
    ):
        open_body(folder, 1, ranks[::-1], 2)


def test_one_instance_bears_its_copy_alone(
    saved: tuple[Path, list[list[int]]], files: Files
) -> None:
    """Those that the cluster grows by have as much memory for KV, and bear nothing."""
    folder, _ = saved
    fds = files(1)
    with (
        closing(open_body(folder)) as own,
        closing(open_body(folder, 0, fds, num_sharers=1)) as body,
        closing(open_body(folder, 1, fds, num_sharers=1)) as joined,
    ):
        assert body.spec.kv_units == joined.spec.kv_units == own.spec.kv_units
        assert body.spec.borrowed_bytes <= body.spec.granule_bytes
        kv_bytes = joined.spec.kv_units * joined.spec.unit_bytes
        assert 0 <= joined.spec.memory_bytes - kv_bytes < joined.spec.granule_bytes
        assert (
            joined.spec.shared_weights_bytes - joined.spec.borrowed_bytes < own.spec.granule_bytes
        )
