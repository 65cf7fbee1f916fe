"""KV in pinned memory: copies run late, beside steps; what may not happen before their end."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from kunserve.control.instance.body import HostCopy
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.engine.body import EngineBody
from kunserve.transport.bulk.host_store import HostStore
from kunserve_extras.torch_body.cuda import host_kv
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.torch_body.cuda.driver import CudaError, Driver
from kunserve_extras.torch_body.cuda.host_kv import HostCopies, PinnedKv, PinnedPool
from tests.extras.torch_body.cuda.test_device_memory import DeviceMemory
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tiny_models import tiny_model

A, B = RequestId("a"), RequestId("b")
NUM_SLOTS = 6


def nothing_before(stream: int) -> None:
    pass


@pytest.fixture
def memory(driver: Driver) -> Iterator[DeviceMemory]:
    made = DeviceMemory(driver)
    made.stamp()
    yield made
    made.close()


class Steps:
    """A stream on which a step writes, as late as it may."""

    def __init__(self, driver: Driver, memory: DeviceMemory) -> None:
        self._driver = driver
        self._memory = memory
        self.stream = driver.stream()
        self._event = driver.event()

    def write(self, unit: int, like: int) -> None:
        """What unit ``like`` has."""
        source, target = (self._memory.units_at(one, 1) for one in (like, unit))
        self._driver.copy_inside(target, source, self._memory.unit_bytes, self.stream)

    def begin_behind(self, stream: int) -> None:
        self._driver.record(self._event, self.stream)
        self._driver.begin_behind(self._event, stream)

    def close(self) -> None:
        self._driver.stream_destroy(self.stream)
        self._driver.event_destroy(self._event)


def open_kv(
    driver: Driver,
    memory: DeviceMemory,
    behind: Callable[[int], None] = nothing_before,
    num_slots: int = NUM_SLOTS,
) -> PinnedKv:
    return PinnedKv(driver, memory, num_slots * memory.unit_bytes, behind)


def end(kept: PinnedKv) -> None:
    kept.begin()
    kept.wait()


def units_of(memory: DeviceMemory, unit: int, num_units: int) -> list[int]:
    """The stamps that are there."""
    data = np.empty((num_units, memory.unit_bytes), dtype=np.uint8)
    memory.read_units([(unit, num_units)], data.reshape(-1))
    assert (data == data[:, :1]).all()
    return [int(stamp) for stamp in data[:, 0]]


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_block_leaves_as_the_last_step_before_wrote_it(
    memory: DeviceMemory, driver: Driver, is_behind: bool
) -> None:
    """Or as it was before that, where copies do not wait for the step."""
    steps = Steps(driver, memory)
    behind = steps.begin_behind if is_behind else nothing_before
    with closing(steps), closing(open_kv(driver, memory, behind)) as kept:
        steps.write(5, like=9)
        kept.put(A, 0, 4, 2)
        kept.begin()
        end(kept)
        kept.take(A, 0, 20, 2)
        end(kept)
        assert units_of(memory, 20, 2) == [4, 9 if is_behind else 5]


def test_copies_run_beside_what_follows_and_their_end_is_asked_for(
    memory: DeviceMemory, driver: Driver, fake: FakeCuda
) -> None:
    fake.answer_after(4)
    with closing(open_kv(driver, memory)) as kept:
        kept.put(A, 3, 4, 3)
        assert kept.is_copying, "asked for, and not begun"
        kept.begin()
        # Of two streams, each of which is asked until it is done.
        assert [kept.is_copying for _ in range(8)] == [True] * 6 + [False] * 2
        before = fake.num_calls
        assert not kept.is_copying and fake.num_calls == before, "nothing is asked for nothing"
        memory.write_units([(4, 3)], np.zeros(3 * memory.unit_bytes, dtype=np.uint8))
        kept.take(A, 3, 11, 3)
        kept.begin()
        assert kept.is_copying and units_of(memory, 11, 3) == [11, 12, 13], "not there yet"
        end(kept)
        assert units_of(memory, 11, 3) == [4, 5, 6] and not kept.is_copying


def test_who_is_forgotten_on_its_way_writes_to_nobody_elses_units(
    memory: DeviceMemory, driver: Driver
) -> None:
    """Its units are the next one's at once, and its slots are free."""
    with closing(open_kv(driver, memory)) as kept:
        kept.put(A, 0, 4, 3)
        end(kept)
        kept.take(A, 0, 8, 3)
        kept.begin()
        kept.forget(A)
        memory.write_units([(8, 3)], np.full(3 * memory.unit_bytes, 77, dtype=np.uint8))
        assert not kept.is_copying and units_of(memory, 8, 3) == [77, 77, 77]
        kept.put(A, 0, 4, 3)
        kept.begin()
        kept.forget(A)
        kept.put(B, 0, 4, NUM_SLOTS)


def test_both_ways_at_once(memory: DeviceMemory, driver: Driver) -> None:
    with closing(open_kv(driver, memory)) as kept:
        kept.put(A, 0, 4, 3)
        end(kept)
        kept.put(B, 0, 14, 3)
        kept.take(A, 0, 8, 3)
        kept.begin()
        end(kept)
        assert units_of(memory, 8, 3) == [4, 5, 6]
        kept.take(B, 0, 4, 3)
        end(kept)
        assert units_of(memory, 4, 3) == [14, 15, 16]


def test_a_slot_is_free_once_its_block_is_back_and_not_before(
    memory: DeviceMemory, driver: Driver
) -> None:
    with closing(open_kv(driver, memory)) as kept:
        kept.put(A, 0, 4, NUM_SLOTS)
        end(kept)
        with pytest.raises(AssertionError, match="block 0 of a is in host memory already"):
            kept.put(A, 0, 4, NUM_SLOTS)
        kept.take(A, 0, 12, NUM_SLOTS)
        with pytest.raises(AssertionError, match="more KV goes to host memory than was promised"):
            kept.put(B, 0, 4, NUM_SLOTS)
        kept.begin()
        with pytest.raises(AssertionError, match="more KV goes to host memory than was promised"):
            kept.put(B, 1, 4, NUM_SLOTS)
        end(kept)
        kept.put(B, 2, 4, NUM_SLOTS)


def test_whoever_is_forgotten_leaves_its_memory(memory: DeviceMemory, driver: Driver) -> None:
    with closing(open_kv(driver, memory)) as kept:
        for _ in range(3):
            kept.put(A, 0, 4, 2)
            kept.put(A, 1, 8, 4)
            end(kept)
            kept.forget(A)
            kept.forget(B)
        with pytest.raises(KeyError):
            kept.take(A, 0, 4, 2)


def test_blocks_of_one_size_lie_in_one_piece_whatever_came_and_went(driver: Driver) -> None:
    pool = PinnedPool(driver, 64 * KIB, KIB)
    with closing(pool):
        draw = np.random.default_rng(0)
        held = [pool.take(4) for _ in range(12)]
        for _ in range(50):
            pool.give(held.pop(int(draw.integers(len(held)))))
            held.append(pool.take(4))
        assert all(len(pool.copies(slots, 0)) == 1 for slots in held)
        assert sorted(slot for slots in held for slot in slots) == sorted(
            {slot for slots in held for slot in slots}
        )
        for slots in held:
            pool.give(slots)
        pieces = pool.copies([3, 4, 9], 1000)
        assert [(p.device, p.num_bytes) for p in pieces] == [(1000, 2 * KIB), (1000 + 2 * KIB, KIB)]
        assert pieces[1].host - pieces[0].host == 6 * KIB
        assert pool.num_free == 64


def test_more_than_the_machine_has_is_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_kv, "available_bytes", lambda: KIB)
    with pytest.raises(OSError, match="1024 bytes are left"):
        PinnedPool(driver, 2 * KIB, KIB)


def test_an_error_of_the_device_is_no_answer(driver: Driver, fake: FakeCuda) -> None:
    copies = HostCopies(driver)
    with closing(copies):
        copies.begin((), ())
        fake.refuse(0)
        with pytest.raises(CudaError, match="cuEventQuery"):
            assert copies.is_copying


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", 2).save_pretrained(tmp_path)
    return tmp_path


def open_body(folder: Path, host_bytes: int | None) -> EngineBody:
    config = InstanceConfig(memory_bytes=2 << 20, granule_bytes=8 * KIB, block_size=8)
    model = ModelConfig(model=str(folder), dtype="float32")
    backend = CudaBackend(torch.device("cpu"), build())
    return EngineBody(InstanceId(0), model, config, backend=backend, host_bytes=host_bytes)


@pytest.mark.parametrize(("host_bytes", "is_refused"), [(1 << 20, 0), (1 << 20, 1), (None, 0)])
def test_where_memory_cannot_be_pinned_blocks_go_as_before(
    host_bytes: int | None,
    is_refused: int,
    folder: Path,
    fake: FakeCuda,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if is_refused:
        fake.refuse_pinning()
    with caplog.at_level(logging.INFO), closing(open_body(folder, host_bytes)) as body:
        is_pinned = host_bytes is not None and not is_refused
        assert isinstance(body._host, PinnedKv if is_pinned else HostStore)
        assert caplog.text.count("cannot be pinned (CUDA_ERROR_NOT_PERMITTED") == is_refused
        assert caplog.text.count("host memory for KV pinned in") == is_pinned
        units = np.random.default_rng(0).integers(0, 255, 2 * body.memory.unit_bytes, np.uint8)
        body.memory.write_units([(5, 2)], units)
        copy = HostCopy(A, 0, np.array([5], dtype=np.int32), 2)
        body.swap_units((copy,), (), beside_step=False)
        body.memory.write_units([(5, 2)], np.zeros_like(units))
        body.swap_units((), (copy._replace(starts=copy.starts + 3),), beside_step=False)
        back = np.empty_like(units)
        body.memory.read_units([(8, 2)], back)
        assert (back == units).all()
