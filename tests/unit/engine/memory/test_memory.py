import ctypes
import dataclasses
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.instance.body import UnitCopy
from kunserve.core.config import MIB, InstanceConfig
from kunserve.core.errors import TooLittleMemory
from kunserve.core.faults import EXIT_REMAP_FAILED
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory import address_space
from kunserve.engine.memory.instance_memory import InstanceMemory, RemapFailed
from kunserve.engine.memory.memory_plan import MemoryPlan
from kunserve.engine.weights.layout import WeightLayout
from tests.direct_engine import arenas_mapped
from tests.specs import SMOLLM2_135M
from tests.unit.engine.memory.test_huge_pages import gives_unasked

SMOLLM2 = SMOLLM2_135M
SMALL = dataclasses.replace(
    SMOLLM2, hidden_size=96, intermediate_size=64, num_heads=1, num_kv_heads=1, vocab_size=100
)
SMALL_INSTANCE = InstanceConfig(kv_cache_memory_bytes=MIB, granule_bytes=8192)


@pytest.fixture
def memory() -> Iterator[InstanceMemory]:
    made = InstanceMemory(InstanceId(0), SMOLLM2, InstanceConfig(memory_bytes=320 * MIB))
    yield made
    made.close()


def test_half_the_layers_become_kv_and_come_back(memory: InstanceMemory) -> None:
    spec = memory.spec
    calls = memory.arena.num_calls
    for _ in range(3):
        dropped = memory.drop(LayerRange(0, 15))
        assert dropped.kv_units == spec.units_when_holding(15) <= memory.backed_units
        assert abs(dropped.moved_bytes - 15 * spec.layer_bytes) <= 2 * spec.granule_bytes
        memory.check(ask_kernel=True)
        back = memory.reclaim(LayerRange(15, 30))
        assert back.kv_units == spec.kv_units and back.moved_bytes == -dropped.moved_bytes
        memory.check(ask_kernel=True)
    # Two system calls for whole pages and for each edge: nothing is done granule by granule.
    assert 3 * 2 * 2 <= memory.arena.num_calls - calls <= 3 * 2 * 8


def test_levels_of_drop_and_partial_restore(memory: InstanceMemory) -> None:
    spec = memory.spec
    memory.drop(LayerRange(0, 15))
    memory.drop(LayerRange(7, 15))
    memory.check(ask_kernel=True)
    memory.reclaim(LayerRange(15, 20))
    assert memory.held == LayerRange(7, 20)
    assert memory.kv_units == spec.units_when_holding(13)
    memory.reclaim(LayerRange(0, 30))
    assert memory.kv_units == spec.kv_units
    memory.check(ask_kernel=True)


def test_held_layers_and_low_units_keep_their_content(memory: InstanceMemory) -> None:
    memory.layer_view(7)[:] = 7
    memory.unit_view(3, 1)[:] = 33
    memory.drop(LayerRange(5, 9))
    memory.copy_units((UnitCopy(3, memory.kv_units - 1, 1), UnitCopy(memory.kv_units - 1, 0, 1)))
    memory.reclaim(LayerRange(0, 30))
    assert (memory.layer_view(7) == 7).all()
    assert (memory.unit_view(0, 1) == 33).all()


def test_every_entry_down_to_minus_layers_has_an_address(memory: InstanceMemory) -> None:
    lowest = memory.kv_base_address - 30 * memory.spec.unit_bytes
    assert memory.kv.base_address <= lowest


def test_the_kv_size_can_be_given_instead() -> None:
    config = InstanceConfig(memory_bytes=1, kv_cache_memory_bytes=50 * MIB)
    plan = MemoryPlan.of(SMOLLM2, config)
    unit = SMOLLM2.unit_bytes(16)
    assert plan.kv_units == 50 * MIB // unit


def test_too_little_memory_says_what_is_needed() -> None:
    with pytest.raises(TooLittleMemory, match=r"at least 257\.5 MiB.*has 200\.0 MiB.*0 tokens"):
        MemoryPlan.of(SMOLLM2, InstanceConfig(memory_bytes=200 * MIB))


@given(
    hidden=st.integers(1, 40),
    inner=st.integers(1, 90),
    layers=st.integers(1, 9),
    granule_pages=st.integers(1, 4),
    block_size=st.integers(1, 20),
    qk_norm=st.booleans(),
    cut=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_the_promise_holds_for_any_shape_and_run(
    hidden: int,
    inner: int,
    layers: int,
    granule_pages: int,
    block_size: int,
    qk_norm: bool,
    cut: tuple[int, int],
) -> None:
    """Whatever is kept frees at least what ``units_when_holding`` promises."""
    model = dataclasses.replace(
        SMOLLM2,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=100,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        qk_norm=qk_norm,
    )
    granule = granule_pages * 4096
    config = InstanceConfig(
        kv_cache_memory_bytes=model.block_bytes(block_size),
        granule_bytes=granule,
        block_size=block_size,
    )
    plan = MemoryPlan.of(model, config)
    layout = WeightLayout(model, granule)
    first, end = min(*cut, layers - 1), min(max(cut) + 1, layers)
    kept_first, kept_end = layout.granules_of(LayerRange(first, end))
    all_first, all_end = layout.granules_of(LayerRange(0, layers))
    freed = kept_first - all_first + all_end - kept_end
    dropped_bytes = (layers - (end - first)) * model.layer_bytes
    promised = max(0, dropped_bytes // granule - 1) if dropped_bytes else 0
    assert freed >= promised
    unit = model.unit_bytes(block_size)
    backed = (plan.num_granules - plan.weights_granules + freed) * granule // unit
    assert backed >= plan.kv_units + promised * granule // unit


class FailingSystem:
    """Stands for the C library: the ``fails_at``-th call that maps or moves gives ENOMEM."""

    def __init__(self, fails_at: int) -> None:
        self.num_calls = 0
        self._fails_at = fails_at
        self._quick, self._patient = address_space._libc, address_space._patient_libc

    def __getattr__(self, name: str) -> Any:
        true = getattr(self._quick if name == "mremap" else self._patient, name)
        if name not in ("mmap", "mremap"):
            return true

        def call(*arguments: Any) -> int | None:
            self.num_calls += 1
            if self.num_calls - 1 == self._fails_at:
                ctypes.set_errno(errno.ENOMEM)
                return ctypes.c_void_p(-1).value
            result: int | None = true(*arguments)
            return result

        return call


@pytest.mark.parametrize("is_reclaim", [False, True])
@pytest.mark.parametrize("has_mremap", [False, True])
def test_a_remap_that_fails_at_any_call_is_whole_or_ends_the_instance(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_reclaim: bool,
    has_mremap: bool,
) -> None:
    """Two runs of granules move, as for a stage in the middle of a pipeline."""
    if not has_mremap:
        monkeypatch.setattr(address_space, "move", lambda *_: False)
    middle, whole = LayerRange(10, 20), LayerRange(0, 30)
    num_failed = 0
    for fails_at in range(100):
        memory = InstanceMemory(InstanceId(0), SMALL, SMALL_INSTANCE)
        if is_reclaim:
            memory.drop(middle)
        system = FailingSystem(fails_at)
        with monkeypatch.context() as patch:
            patch.setattr(address_space, "_libc", system)
            patch.setattr(address_space, "_patient_libc", system)
            try:
                memory.reclaim(whole) if is_reclaim else memory.drop(middle)
            except RemapFailed as failure:
                assert failure.code == EXIT_REMAP_FAILED
                num_failed += 1
            else:
                memory.check(ask_kernel=True)
                assert memory.held == (whole if is_reclaim else middle)
        memory.close()
        if system.num_calls <= fails_at:
            break
    # With mremap only its two unmaps can fail; without, every unmap and map.
    assert num_failed == (2 if has_mremap else 4)
    assert caplog.text.count("the instance ends") == num_failed
    assert caplog.text.count("Cannot allocate memory") == num_failed


def test_a_failed_remap_ends_the_process_with_a_word() -> None:
    """Also where somebody along the way catches every Exception."""
    code = """
import logging
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory import address_space
from kunserve.engine.memory.instance_memory import InstanceMemory
from tests.unit.engine.memory.test_memory import SMALL, SMALL_INSTANCE, FailingSystem
logging.basicConfig()
memory = InstanceMemory(InstanceId(0), SMALL, SMALL_INSTANCE)
address_space._libc = FailingSystem(1)
try:
    memory.drop(LayerRange(0, 15))
except Exception:
    print("caught")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == EXIT_REMAP_FAILED, ended
    assert "remap failed half-way, the instance ends" in ended.stderr and ended.stdout == ""


@pytest.mark.parametrize("fails_at", range(2))
def test_memory_is_in_small_pages_where_there_is_no_address_to_collapse_it(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    monkeypatch.setattr(address_space, "_libc", FailingSystem(fails_at))
    memory = InstanceMemory(InstanceId(0), SMALL, SMALL_INSTANCE)
    huge_bytes = address_space.huge_bytes_at(memory.weights.base_address, memory.weights_bytes)
    assert huge_bytes == 0 or gives_unasked()
    memory.check(ask_kernel=True)
    memory.close()


@pytest.mark.parametrize("fails_at", range(2, 6))
def test_memory_that_cannot_be_mapped_at_start_is_refused(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    monkeypatch.setattr(address_space, "_libc", FailingSystem(fails_at))
    before = arenas_mapped()
    with pytest.raises(TooLittleMemory, match="the machine cannot map"):
        InstanceMemory(InstanceId(0), SMALL, SMALL_INSTANCE)
    assert arenas_mapped() == before


def test_layers_are_packed_without_overlap() -> None:
    layout = WeightLayout(dataclasses.replace(SMOLLM2, attention_bias=True, qk_norm=True), 4096)
    for section in (layout.ends, layout.layer(0)):
        end = 0
        for slot in section.slots.values():
            assert slot.offset >= end and slot.offset % 64 == 0
            end = slot.offset + int(np.prod(slot.shape)) * 2
        assert end <= section.num_bytes
    assert layout.ends.num_bytes <= layout.layers_offset


def test_peers_find_units_and_layers_in_the_file_whatever_was_remapped() -> None:
    memory = InstanceMemory(InstanceId(0), SMALL, SMALL_INSTANCE)
    rng = np.random.default_rng(5)
    for change in (
        lambda: memory.drop(LayerRange(4, 11)),
        lambda: memory.reclaim(LayerRange(0, SMALL.num_layers)),
        lambda: memory.drop(LayerRange(20, 30)),
    ):
        change()
        runs = [(0, 3), (memory.backed_units - 7, 7), (memory.backed_units // 2, 5)]
        for run in runs:
            memory.unit_view(*run)[:] = rng.integers(0, 256, run[1] * memory.unit_bytes, np.uint8)
        layer = memory.held.first
        memory.layer_view(layer)[:] = rng.integers(0, 256, memory.layer_bytes, np.uint8)
        assert memory.shared_fd is not None
        for extents, want in (
            (memory.locate_units(runs), np.concatenate([memory.unit_view(*run) for run in runs])),
            (memory.locate_layer(layer, 0, memory.layer_bytes), memory.layer_view(layer)),
            (memory.locate_layer(layer, 100, 500), memory.layer_view(layer)[100:600]),
        ):
            parts = [os.pread(memory.shared_fd, num, offset) for offset, num in extents]
            assert b"".join(parts) == want.tobytes()
    memory.close()
