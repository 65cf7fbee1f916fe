"""Memory in pages of 2 MiB: at the start, and whatever is moved."""

import dataclasses
import errno
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.config import MIB, InstanceConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory import address_space, huge_pages
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES, arrange, fill
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.pages import HostPages
from kunserve_extras.ranks.memory import RankPages
from tests.specs import SMOLLM2_135M

MODEL = dataclasses.replace(
    SMOLLM2_135M,
    num_layers=10,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=1000,
)
INSTANCE = InstanceConfig(memory_bytes=26 * MIB)
WHOLE = LayerRange(0, MODEL.num_layers)


def huge_bytes_of(pages: HostPages) -> int:
    """Of all of them, mapped one after the other."""
    address = pages.reserve(pages.num_granules * pages.granule_bytes)
    pages.map(address, np.arange(pages.num_granules, dtype=np.int32), populate=True)
    return pages.huge_bytes


def gives_huge_pages(num_mib: int) -> bool:
    """Whether the system gives as much in huge pages at this moment: memory may be fragmented.

    Asked by system calls alone, so that what is tested cannot excuse itself.
    """
    num_bytes = num_mib * MIB
    fd = os.memfd_create("control")
    try:
        os.ftruncate(fd, num_bytes)
        with address_space.shown(fd, 0, num_bytes, HUGE_PAGE_BYTES) as address:
            address_space.populate_pages(address, num_bytes)
            address_space.collapse(address, num_bytes)
            return address_space.huge_bytes_at(address, num_bytes) == num_bytes
    finally:
        os.close(fd)


def gives_unasked() -> bool:
    """Whether the system is set to give huge pages to every memory file."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    text = setting.read_text(encoding="ascii") if setting.exists() else ""
    return any(f"[{word}]" in text for word in ("always", "within_size", "force"))


def needs_huge_pages(num_mib: int) -> pytest.MarkDecorator:
    """For a test that fills so much of them."""
    return pytest.mark.skipif(
        f"not gives_huge_pages({num_mib})",
        reason=f"the system does not give {num_mib} MiB of huge pages now",
    )


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.fixture
def memory() -> Iterator[InstanceMemory]:
    made = InstanceMemory(InstanceId(0), MODEL, INSTANCE)
    yield made
    made.close()


def touched_huge_bytes(memory: InstanceMemory) -> int:
    """What this process sees in huge pages, when it has touched all."""
    memory.kv.bytes_view(
        memory.kv_base_address - memory.kv.base_address, memory.kv_units * memory.unit_bytes
    )[::4096].max()
    for layer in range(*memory.held):
        memory.layer_view(layer)[::4096].max()
    return memory.huge_bytes


@needs_huge_pages(8)
def test_a_file_is_filled_but_for_its_end(file: int) -> None:
    os.ftruncate(file, 7 * MIB)
    fill(file, 0, 7 * MIB, 7 * MIB)
    assert os.fstat(file).st_blocks * 512 == 6 * MIB
    assert os.pread(file, 7 * MIB, 0) == bytes(7 * MIB)


def test_what_does_not_begin_with_a_page_is_left_alone(file: int) -> None:
    os.ftruncate(file, 8 * MIB)
    fill(file, MIB, 6 * MIB, 6 * MIB)
    assert os.fstat(file).st_blocks == 0


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.ENOSYS, errno.EAGAIN])
def test_a_system_that_refuses_gives_small_pages(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(address_space, "collapse", lambda *_: code)
    monkeypatch.setattr(address_space, "advise_huge", lambda *_: None)
    pages = HostPages(6 * MIB, 1 << 18)
    assert os.fstat(pages.fd).st_blocks * 512 == 6 * MIB
    assert huge_bytes_of(pages) == 0 or gives_unasked()
    pages.check()
    pages.close()


def test_an_old_kernel_gives_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "populate_pages", lambda *_: False)
    pages = HostPages(6 * MIB, 1 << 18)
    assert os.fstat(pages.fd).st_blocks * 512 == 6 * MIB
    pages.close()


@needs_huge_pages(40)
def test_some_pages_are_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit any more is taken in small pages."""
    true, calls = address_space.collapse, itertools.count()

    def collapse(address: int, num_bytes: int) -> int:
        if next(calls) == 0:
            return true(address, num_bytes - HUGE_PAGE_BYTES) or errno.ENOMEM
        return errno.ENOMEM

    monkeypatch.setattr(address_space, "collapse", collapse)
    pages = HostPages(40 * MIB, 1 << 18)
    assert huge_bytes_of(pages) == 30 * MIB
    assert os.fstat(pages.fd).st_blocks * 512 == 40 * MIB
    assert next(calls) == 1
    pages.close()


def test_off_is_off() -> None:
    pages = HostPages(6 * MIB, 1 << 18, huge=False)
    assert huge_bytes_of(pages) == 0 or gives_unasked()
    assert os.fstat(pages.fd).st_blocks * 512 == 6 * MIB
    pages.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gives memory slowly: each piece takes too long."""
    monkeypatch.setattr(huge_pages, "_PATIENCE_S", -3600.0)
    monkeypatch.setattr(huge_pages, "_AT_ONCE_BYTES", HUGE_PAGE_BYTES)


@needs_huge_pages(10)
def test_what_comes_quickly_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_PATIENCE_S", 3600.0)
    pages = HostPages(10 * MIB, 1 << 18, first_bytes=4 * MIB)
    assert huge_bytes_of(pages) == 10 * MIB
    pages.close()


@needs_huge_pages(10)
def test_what_is_not_needed_at_once_follows(
    slow: None, caplog: pytest.LogCaptureFixture, eventually: Callable[..., object]
) -> None:
    caplog.set_level(logging.INFO)
    pages = HostPages(10 * MIB, 1 << 18, first_bytes=4 * MIB)
    address = pages.reserve(10 * MIB)
    pages.map(address, np.arange(40, dtype=np.int32))
    assert pages.huge_bytes == 0
    pages.prefault(address, 10 * MIB)
    eventually(lambda: "memory in pages of 2 MiB: 10 of 10 MiB" in caplog.text)
    assert pages.huge_bytes == 10 * MIB
    pages.close()


@needs_huge_pages(16)
def test_content_stays_while_it_is_put_into_huge_pages(slow: None) -> None:
    """Steps use KV that has not been prefaulted yet, from several threads."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        pages = HostPages(16 * MIB, 1 << 18, first_bytes=0)
        address = pages.reserve(16 * MIB)
        pages.map(address, np.arange(64, dtype=np.int32))
        data = rng.integers(0, 256, 16 * MIB, np.uint8)
        spans = [(address + at, 1 << 14) for at in range(0, 16 * MIB, 1 << 14)]
        pages.write(spans[::2], data.reshape(-1, 1 << 14)[::2].reshape(-1))
        pages.prefault(address, 16 * MIB)
        pages.write(spans[1::2], data.reshape(-1, 1 << 14)[1::2].reshape(-1))
        found = np.empty_like(data)
        pages.read(spans, found)
        assert (found == data).all()
        pages.close()


@needs_huge_pages(18)
def test_ranks_begin_with_a_page(file: int) -> None:
    """Their parts are 5 MiB, of which 4 fill pages."""
    ranks = [RankPages(file, rank, True, 5 * MIB, 1 << 18) for rank in range(3)]
    assert [pages.file_offset for pages in ranks] == [0, 6 * MIB, 12 * MIB]
    assert [huge_bytes_of(pages) for pages in ranks] == 3 * [4 * MIB]
    assert os.fstat(file).st_blocks * 512 == 15 * MIB
    for pages in ranks:
        pages.check()
        pages.close()


@needs_huge_pages(32)
def test_what_a_drop_and_a_restore_move_stays_in_huge_pages(memory: InstanceMemory) -> None:
    """But for the pages in which they are cut."""
    at_first = touched_huge_bytes(memory)
    assert at_first >= memory.spec.memory_bytes - 2 * HUGE_PAGE_BYTES
    granules = memory.weights.granules.tolist(), memory.kv.granules.tolist()
    for keep in (LayerRange(0, 5), LayerRange(5, 10), LayerRange(3, 7)):
        memory.drop(keep)
        memory.check(ask_kernel=True)
        num_cuts = 1 + (keep.first > 0) + (keep.end < WHOLE.end)
        assert touched_huge_bytes(memory) >= at_first - 2 * num_cuts * HUGE_PAGE_BYTES, keep
        memory.reclaim(WHOLE)
        memory.check(ask_kernel=True)
        assert (memory.weights.granules.tolist(), memory.kv.granules.tolist()) == granules


@needs_huge_pages(32)
def test_content_is_the_same_in_huge_pages_and_small_ones() -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 40 * MODEL.unit_bytes(INSTANCE.block_size), np.uint8)
    for huge in (True, False):
        pages = functools.partial(HostPages, huge=huge)
        memory = InstanceMemory(InstanceId(0), MODEL, INSTANCE, 0, pages)
        memory.write_units([(3, 40)], data)
        memory.drop(LayerRange(0, 4))
        assert (memory.unit_view(3, 40) == data).all()
        memory.reclaim(WHOLE)
        assert (memory.unit_view(3, 40) == data).all()
        memory.close()


@given(
    stretches=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=1, max_size=5),
    target_slot=st.integers(0, 40),
    per_page=st.sampled_from([1, 2, 4, 8, 512]),
)
def test_pages_stay_whole_where_there_is_room(
    stretches: list[tuple[int, int]], target_slot: int, per_page: int
) -> None:
    granules = np.concatenate(
        [np.arange(first, first + num) + 200 * i for i, (first, num) in enumerate(stretches)]
    ).astype(np.int32)
    num = len(granules)
    placed = np.full(num, -1)
    for first, place, length in arrange(granules, target_slot, per_page):
        assert (placed[place : place + length] == -1).all()
        placed[place : place + length] = granules[first : first + length]
    assert sorted(placed.tolist()) == sorted(granules.tolist())

    def whole(ids: np.ndarray, slots: range) -> int:
        """Pages that lie whole and in order, at slots that suit them where those are given."""
        return sum(
            ids[at] % per_page == 0
            and (np.diff(ids[at : at + per_page]) == 1).all()
            and (at + target_slot) % per_page == 0
            for at in slots
        )

    begins = range(num - per_page + 1)
    anywhere = sum(
        granules[at] % per_page == 0 and bool((np.diff(granules[at : at + per_page]) == 1).all())
        for at in begins
    )
    windows = [at for at in begins if (at + target_slot) % per_page == 0]
    assert whole(placed, begins) >= min(anywhere, len(windows))
    back = np.full(num, -1)
    if len(stretches) == 1:
        for first, place, length in arrange(placed.astype(np.int32), int(granules[0]), per_page):
            back[place : place + length] = placed[first : first + length]
        assert (back == granules).all()
