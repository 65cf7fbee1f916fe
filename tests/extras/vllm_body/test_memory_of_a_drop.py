"""No copy of weights lies beside the arena: what a drop frees is all that they took."""

import gc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.core.config import MIB
from kunserve.core.layout import LayerRange
from tests.running.engines import ENGINES, NEEDS_VLLM, open_engine
from tests.tiny_models import tiny_model

NUM_LAYERS, NUM_RESTORES = 8, 3
WHOLE, KEPT = LayerRange(0, NUM_LAYERS), LayerRange(0, 3)
DROPPED = LayerRange(3, NUM_LAYERS)
ARENA_BYTES = 256 * MIB
GRANULE_BYTES = 64 * 1024


def resident(kind: str) -> int:
    """Bytes of this process: in RssShmem are arenas, in RssAnon what libraries take."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


@NEEDS_VLLM  # our own is what it is held against, and the process should have nothing else in it
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_in_the_arena_only(engine: str, kind: str, tmp_path: Path) -> None:
    tiny, large = tmp_path / "tiny", tmp_path / "large"
    tiny_model(kind, NUM_LAYERS).save_pretrained(tiny)
    sizes = {"hidden_size": 256, "intermediate_size": 3072, "moe_intermediate_size": 512}
    tiny_model(kind, NUM_LAYERS, **sizes).save_pretrained(large)
    with closing(open_engine(tiny, 0, engine)):
        pass  # libraries are here now, and what they make once
    shared, own = resident("RssShmem"), resident("RssAnon")
    options = {"memory_bytes": ARENA_BYTES, "granule_bytes": GRANULE_BYTES}
    with closing(open_engine(large, 0, engine, **options)) as body:  # type: ignore[arg-type]
        memory = body.memory
        layer_bytes = memory.shards[0].layout.layer_bytes
        assert layer_bytes > 4 * MIB

        def check() -> None:
            gc.collect()
            # KV's pages become resident in the background, so there may be fewer.
            assert resident("RssShmem") - shared < ARENA_BYTES + layer_bytes / 2
            assert resident("RssAnon") - own < layer_bytes / 2

        check()
        num_before = memory.shards[0].kv.num_mapped
        memory.drop(KEPT)
        lent_bytes = (memory.shards[0].kv.num_mapped - num_before) * GRANULE_BYTES
        assert lent_bytes > 0.9 * DROPPED.num_layers * layer_bytes
        garbage = np.full(memory.unit_bytes, 0xFF, dtype=np.uint8)
        for _ in range(NUM_RESTORES):
            lent = range(memory.spec.kv_units, memory.spec.units_when_holding(KEPT.num_layers))
            for unit in lent:
                memory.write_units([(unit, 1)], garbage)
            memory.reclaim(WHOLE)
            body.load_layers(DROPPED)
            check()
            memory.drop(KEPT)
