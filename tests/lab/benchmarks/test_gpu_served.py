"""How many streams one instance of a GPU day is asked by at once."""

from pathlib import Path

import pytest

from benchmarks.gpu_phases import served
from benchmarks.gpu_phases.machine import GIB, Machine
from kunserve.core.errors import TooLittleMemory

TOKENS, BLOCK_SIZE = 1128, 64


def machine_with(free_gib: int, monkeypatch: pytest.MonkeyPatch) -> Machine:
    driver = type("Driver", (), {"memory_bytes": lambda self: (free_gib * GIB, 80 * GIB)})
    monkeypatch.setattr(Machine, "driver", lambda machine: driver())
    return Machine(True, "no library", Path())


@pytest.mark.parametrize(("free_gib", "least"), [(78, 256), (36, 128), (26, 64)])
def test_streams_fit_into_the_memory_that_is_left(
    free_gib: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kv_bytes = served._model(machine_with(free_gib, monkeypatch))
    assert spec.weights_bytes + kv_bytes < (free_gib - 5) * GIB
    most = served.most_streams(spec, kv_bytes, BLOCK_SIZE, TOKENS)
    assert least <= most < 2 * least + 8
    assert most * TOKENS * spec.unit_bytes(1) * spec.num_layers < kv_bytes


def test_a_card_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLittleMemory, match="too little for qwen2.5-7b"):
        served._model(machine_with(22, monkeypatch))
