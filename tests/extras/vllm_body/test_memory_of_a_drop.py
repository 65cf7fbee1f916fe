"""What a drop frees is memory of this process: no copy of the weights is left anywhere."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kunserve.core.config import MIB
from kunserve.core.layout import LayerRange
from tests.running.engines import NEEDS_VLLM, open_engine
from tests.tiny_models import tiny_model

NUM_LAYERS = 8
WHOLE, KEPT = LayerRange(0, NUM_LAYERS), LayerRange(0, 3)
DROPPED = LayerRange(3, NUM_LAYERS)


def resident(kind: str) -> int:
    """Bytes of this process: in RssShmem are arenas, in RssAnon what libraries take."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


@NEEDS_VLLM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_vllm_leaves_no_copy(kind: str, dtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 3072, "moe_intermediate_size": 512}
    tiny_model(kind, NUM_LAYERS, **sizes).save_pretrained(tmp_path)
    options = {"memory_bytes": 256 * MIB, "granule_bytes": 64 * 1024, "dtype": dtype}
    with closing(open_engine(tmp_path, 0, "vllm", **options)) as body:  # type: ignore[arg-type]
        layout = body.memory.shards[0].layout
        dropped = DROPPED.num_layers * layout.layer_bytes
        assert dropped > 10 * MIB
        shared, own = resident("RssShmem"), resident("RssAnon")
        kv, granule = body.memory.shards[0].kv, 64 * 1024
        num_before = kv.num_mapped
        body.memory.drop(KEPT)
        lent = (kv.num_mapped - num_before) * granule
        assert lent > 0.9 * dropped
        # Pages move with their content, so the process has as many as before, and they are KV's.
        assert abs(shared - resident("RssShmem")) < 0.1 * dropped
        end = body.memory.spec.units_when_holding(KEPT.num_layers)
        units = end - body.memory.spec.kv_units
        garbage = np.full(units * body.memory.unit_bytes, 0xFF, dtype=np.uint8)
        body.memory.write_units([(end - units, units)], garbage)
        assert abs(shared - resident("RssShmem")) < 0.1 * dropped, "no page more was needed"
        for _ in range(3):
            body.memory.reclaim(WHOLE)
            body.load_layers(DROPPED)
            assert abs(shared - resident("RssShmem")) < 0.1 * dropped
            body.memory.drop(KEPT)
        assert resident("RssAnon") - own < 0.5 * dropped, "what was loaded lies in the arena only"
