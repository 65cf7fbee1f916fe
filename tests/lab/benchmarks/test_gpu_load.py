"""How many requests the loaded drop of a GPU day is asked beside."""

import pytest

from benchmarks.gpu_phases.load import streams_of
from benchmarks.gpu_phases.machine import GIB, SHAPES


@pytest.mark.parametrize(("name", "free_gib"), [("7b", 67), ("14b", 67), ("14b", 127)])
def test_streams_leave_memory_until_a_drop_is_asked_for(name: str, free_gib: int) -> None:
    spec = SHAPES[name]
    memory_bytes = min(free_gib * GIB // 2, spec.weights_bytes + 24 * GIB)
    num_streams = streams_of(spec, memory_bytes, 3000)
    token_bytes = 2 * spec.num_layers * spec.kv_size * spec.dtype_bytes
    # Half of them on each: the share is of one instance's KV memory.
    used = -(-num_streams // 2) * 3000 * token_bytes / (memory_bytes - spec.weights_bytes)
    assert 8 <= num_streams <= 64 and used < 0.8
