"""Sums over processes by gloo: the same bits everywhere, and no wait without an end."""

import os
import signal
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from kunserve_extras.device_ranks.sums import GroupSums, SumsBy, make_store_file
from kunserve_extras.ranks.meeting import RankLost

CPU = torch.device("cpu")


def join(store_fd: int, rank: int, num_ranks: int = 2, patience_s: float = 30.0) -> GroupSums:
    return GroupSums(SumsBy.GLOO, store_fd, rank, num_ranks, CPU, patience_s)


def fork(work: Callable[[], None]) -> int:
    """A process that does this, and ends with 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def values(rank: int) -> list[torch.Tensor]:
    """Of both types, and numbers that bfloat16 cannot add up exactly."""
    draw = torch.Generator().manual_seed(rank)
    wide = torch.randn(5, 7, generator=draw)
    return [wide, wide.bfloat16()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork() beside gloo's threads
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_have_the_sum_and_the_first_has_all_parts(num_ranks: int) -> None:
    store_fd = make_store_file()
    expected = []
    for parts in zip(*map(values, range(num_ranks)), strict=True):
        expected.append(sum(part.float() for part in parts).to(parts[0].dtype))

    def take_part(rank: int) -> None:
        with closing(join(store_fd, rank, num_ranks)) as sums:
            for mine, whole in zip(values(rank), expected, strict=True):
                parts = sums.gather(mine)
                assert (parts is None) == (rank > 0)
                for other, part in enumerate(parts or ()):
                    assert any(torch.equal(part, one) for one in values(other))
                sums.add_up(mine)
                torch.testing.assert_close(mine, whole)

    pids = [fork(lambda rank=rank: take_part(rank)) for rank in range(1, num_ranks)]
    take_part(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_gone_or_stands_still_is_not_waited_for(ends_by: signal.Signals) -> None:
    """The dead is seen at once, long before any patience is over."""
    store_fd = make_store_file()
    patience_s = 60.0 if ends_by is signal.SIGKILL else 3.0

    def take_part() -> None:
        sums = join(store_fd, 1, patience_s=patience_s)
        sums.add_up(torch.ones(3))
        os.kill(os.getpid(), ends_by)

    pid = fork(take_part)
    with closing(join(store_fd, 0, patience_s=patience_s)) as sums:
        sums.add_up(torch.ones(3))
        with pytest.raises(RankLost, match="is lost"):
            sums.add_up(torch.ones(3))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_who_never_comes_is_not_waited_for() -> None:
    with pytest.raises(RankLost, match="do not find each other"):
        join(make_store_file(), 0, patience_s=0.3)
