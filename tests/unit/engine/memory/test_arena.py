import mmap
import os

import numpy as np
import pytest

from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.memory import address_space
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.pages import HostPages

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena():
    made = Arena(HostPages(16 * PAGE, PAGE))
    yield made
    made.close()


def test_content_moves_with_its_granules(arena: Arena) -> None:
    source = arena.reserve("source", 8 * PAGE)
    target = arena.reserve("target", 8 * PAGE)
    arena.map(source, 0, arena.take(8))
    source.bytes_view().reshape(8, PAGE)[:] = np.arange(8, dtype=np.uint8)[:, None]
    arena.move(source, 2, target, 5, 3)
    arena.check(ask_kernel=True)
    assert target.bytes_view(5 * PAGE, 3 * PAGE)[::PAGE].tolist() == [2, 3, 4]
    assert source.granules.tolist() == [0, 1, -1, -1, -1, 5, 6, 7]
    assert source.bytes_view(5 * PAGE, PAGE)[0] == 5


def test_contiguous_runs_take_one_call(arena: Arena) -> None:
    source = arena.reserve("source", 16 * PAGE)
    target = arena.reserve("target", 16 * PAGE)
    arena.map(source, 0, arena.take(16), populate=True)
    assert arena.num_calls == 1
    arena.move(source, 4, target, 0, 8)
    assert arena.num_calls == 3  # one remap, one to reserve the addresses left behind
    assert arena.num_free == 0


def test_moving_works_where_the_kernel_cannot_move(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_space, "move", lambda *_: False)
    source = arena.reserve("source", 4 * PAGE)
    target = arena.reserve("target", 4 * PAGE)
    arena.map(source, 0, arena.take(4))
    source.bytes_view()[:] = 9
    arena.move(source, 1, target, 0, 2)
    arena.check(ask_kernel=True)
    assert (target.bytes_view(0, 2 * PAGE) == 9).all()


def test_unmapped_granules_are_free_again(arena: Arena) -> None:
    held = arena.reserve("held", 16 * PAGE)
    arena.map(held, 0, arena.take(16))
    assert arena.num_free == 0
    assert arena.unmap(held, 3, 4).tolist() == [3, 4, 5, 6]
    assert arena.take(4).tolist() == [3, 4, 5, 6]
    arena.check(ask_kernel=True)


def test_no_granule_is_mapped_twice(arena: Arena) -> None:
    held = arena.reserve("held", 16 * PAGE)
    granules = arena.take(2)
    arena.map(held, 0, granules)
    with pytest.raises(AssertionError):
        arena.map(held, 4, granules)
    with pytest.raises(AssertionError):
        arena.map(held, 1, arena.take(1))
    with pytest.raises(AssertionError):
        arena.take(15)
    arena.check(ask_kernel=True)


def test_a_lost_granule_is_noticed(arena: Arena) -> None:
    held = arena.reserve("held", 4 * PAGE)
    arena.map(held, 0, arena.take(4))
    held.granules[2] = -1
    with pytest.raises(AssertionError):
        arena.check()


def test_close_releases_memory_and_addresses() -> None:
    made = Arena(HostPages(64 * PAGE, PAGE))
    held = made.reserve("held", 64 * PAGE)
    made.map(held, 0, made.take(64))
    held.bytes_view()[:] = 1
    address = held.base_address
    fds = len(os.listdir("/proc/self/fd"))
    made.close()
    made.close()
    assert len(os.listdir("/proc/self/fd")) == fds - 1
    with open("/proc/self/maps", encoding="utf-8") as lines:
        assert not [
            line for line in lines if line.startswith(f"{address:x}-") and "kunserve" in line
        ]


def test_bad_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of"):
        Arena(HostPages(1 << 20, 1000))
    with pytest.raises(TooLittleMemory, match="has .* left"):
        Arena(HostPages(1 << 50, 1 << 30))


@pytest.mark.parametrize("can_move", [True, False])
def test_other_threads_run_while_pages_are_taken_apart(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, can_move: bool
) -> None:
    """What the system has moved leaves no pages behind; before Linux 5.13 they are all there."""
    if not can_move:
        monkeypatch.setattr(address_space, "move", lambda *_: False)
    true, calls = address_space.unmap, []

    def unmap(address: int, num_bytes: int, *, is_moved: bool = False) -> None:
        calls.append(is_moved)
        true(address, num_bytes, is_moved=is_moved)

    monkeypatch.setattr(address_space, "unmap", unmap)
    source, target = (arena.reserve(name, 4 * arena.granule_bytes) for name in ("one", "other"))
    arena.map(source, 0, arena.take(4))
    source.bytes_view()[:] = 7
    arena.move(source, 0, target, 0, 4)
    assert calls == [can_move]
    assert (target.bytes_view() == 7).all()
    arena.check(ask_kernel=True)
