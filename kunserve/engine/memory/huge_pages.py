"""Memory files in pages of 2 MiB, which the processor finds with one entry of its page tables.

Memory is read up to twice as fast from them. A page of a file is mapped whole only where its
address and its place in the file leave the same remainder: what moves must keep that.
"""

import contextlib
import errno
import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kunserve.engine.memory import address_space

HUGE_PAGE_BYTES = 2 << 20
_AT_ONCE_BYTES = 32 << 20
"""Collapsed by one call, because each call first waits for all cores."""
_PATIENCE_S = 1.0
_LEAST_BYTES_PER_S = 1e9
"""Small pages come as quickly. What a machine has given back to its host comes slower."""


def fill(fd: int, offset: int, num_bytes: int, first_bytes: int) -> bool:
    """Take memory for a stretch of a memory file in huge pages, as far as the system gives some.

    Call it before anything is written there: a page of which little is there yet is cleared,
    where one that is full would be copied, in ten times the time. What lies behind ``first_bytes``
    is left where it comes slowly. The rest stays without memory, or with little: take it in the
    ordinary way. Returns whether all whole pages are huge.
    """
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if offset % HUGE_PAGE_BYTES or not whole:
        return False
    # Without addresses for it there are none.
    with (
        contextlib.suppress(OSError),
        address_space.shown(fd, offset, whole, HUGE_PAGE_BYTES) as address,
    ):
        # For kernels that are set to give huge pages to whoever asks (shmem_enabled).
        address_space.advise_huge(address, whole)
        collapses, begin = True, time.monotonic()
        for first in range(0, whole, _AT_ONCE_BYTES):
            late_s = time.monotonic() - begin - _PATIENCE_S
            if first >= first_bytes and late_s * _LEAST_BYTES_PER_S > first:
                return False
            size = min(_AT_ONCE_BYTES, whole - first)
            for at in range(address + first, address + first + size, HUGE_PAGE_BYTES):
                # Where nothing lies, nothing is collapsed.
                if not address_space.populate_pages(at, mmap.PAGESIZE):
                    return False
            collapses = collapses and collapse(address + first, size)
        return collapses
    return False


def collapse(address: int, num_bytes: int) -> bool:
    """Put what lies there into huge pages; False if the system gives no more of them."""
    # One that is busy is no reason to stop: the next may not be. But where there is no free huge
    # page, the system looks long for each.
    return address_space.collapse(address, num_bytes) in (0, errno.EAGAIN)


class Piece(NamedTuple):
    """Consecutive granules of a stretch that go to consecutive places of another."""

    first: int
    place: int
    num: int


def arrange(
    granules: npt.NDArray[np.int32], target_slot: int, granules_per_page: int
) -> Iterator[Piece]:
    """Where in a stretch of slots each of these granules goes, so that most pages stay whole.

    Slots and granules are counted from where a huge page begins. The order of content is lost.
    Whole pages go to the first places that suit them, the rest fills the gaps in its order: so
    what comes back lies as it did.
    """
    num, per_page = len(granules), granules_per_page
    groups = _whole_pages(granules, per_page)
    windows = np.arange(-target_slot % per_page, num - per_page + 1, per_page)
    num_whole = min(len(groups), len(windows))
    inside = np.arange(per_page)
    from_here = (groups[:num_whole, None] + inside).reshape(-1)
    to_there = (windows[:num_whole, None] + inside).reshape(-1)
    is_left, is_gap = np.ones((2, num), dtype=bool)
    is_left[from_here] = is_gap[to_there] = False
    place = np.empty(num, dtype=np.int64)
    place[from_here], place[is_left] = to_there, np.flatnonzero(is_gap)
    cuts = np.flatnonzero(np.diff(place) != 1) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), num], strict=True):
        if last > first:
            yield Piece(first, int(place[first]), last - first)


def _whole_pages(granules: npt.NDArray[np.int32], per_page: int) -> npt.NDArray[np.int64]:
    """Where among the granules those of a whole page begin, side by side and in order."""
    begins = np.flatnonzero(granules[: max(0, len(granules) - per_page + 1)] % per_page == 0)
    steps = np.concatenate([[0], np.cumsum(np.diff(granules) == 1)])
    is_whole: npt.NDArray[np.bool_] = steps[begins + per_page - 1] - steps[begins] == per_page - 1
    return begins[is_whole]
