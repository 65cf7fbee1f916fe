"""Sums over the ranks of an instance by torch.distributed: NCCL between devices, else gloo.

Each instance has a process group of its own, and none is the process's default, so that tests have
several instances in one process.
"""

import contextlib
import enum
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from kunserve_extras.ranks.meeting import RankLost, Why

_LOOPBACK = "lo"


class SumsBy(enum.StrEnum):
    """What carries them."""

    NCCL = "nccl"
    """From device to device. It refuses two ranks on one device."""
    GLOO = "gloo"
    """Through host memory and sockets of the loopback: for CPUs, and for ranks that share a
    device."""


def make_store_file() -> int:
    """A file by which ranks find each other. It has no name, so nobody else can come in.

    It stays open in each process to its end: a group may look into it at any time, by its number.
    """
    return os.memfd_create("kunserve-rendezvous")


class GroupSums:
    """One rank's end of it. Every rank calls the same, in the same order.

    Each wait ends after ``patience_s``, and with gloo at once when a rank dies. With NCCL nothing
    waits here: a device does, and what ends it is the instance's end (``Members``), or NCCL's own
    watch after as long.
    """

    def __init__(
        self,
        by: SumsBy,
        store_fd: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
        patience_s: float,
        why: Why | None = None,
    ) -> None:
        """Returns when all ranks are here. Raises RankLost; ``why``: see there."""
        self._why = why
        self.rank = rank
        self.num_ranks = num_ranks
        self._by = by
        self._device = device
        patience = timedelta(seconds=patience_s)
        try:
            store = dist.FileStore(f"/proc/self/fd/{store_fd}", num_ranks)
            store.set_timeout(patience)
            open_backend = _nccl if by is SumsBy.NCCL else _gloo
            self._group: dist.ProcessGroup | None
            self._group = open_backend(store, rank, num_ranks, device, patience)
        except (RuntimeError, OSError) as error:
            raise RankLost(f"the ranks of this instance do not find each other: {error}") from error

    def add_up(self, tensor: torch.Tensor) -> None:
        """Make it the sum of the ranks' tensors, in place, with the same bits on all ranks.

        Through host memory in float32; by NCCL in the tensor's own type.
        """
        assert tensor.is_contiguous(), tensor.shape
        if self._by is SumsBy.NCCL:
            self._carry(lambda group: group.allreduce([tensor]))
            return
        part = tensor.to("cpu", torch.float32)  # itself, where it is that already
        self._carry(lambda group: group.allreduce([part]))
        if part is not tensor:
            tensor.copy_(part)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        """On rank 0 the tensors of all ranks, which have one shape; None on the others."""
        there = part if self._by is SumsBy.NCCL else part.cpu()
        found = [torch.empty_like(there) for _ in range(self.num_ranks if self.rank == 0 else 0)]
        options = dist.GatherOptions()
        options.rootRank = 0
        lists = [found] if self.rank == 0 else []
        self._carry(lambda group: group.gather(lists, [there], options))
        return [one.to(self._device) for one in found] if self.rank == 0 else None

    def close(self) -> None:
        """Leave the group. Its threads end, and must not be left to whoever collects garbage."""
        if self._by is SumsBy.NCCL and self._group is not None:
            with contextlib.suppress(RuntimeError):  # the others have left already
                self._group.abort()
        self._group = None

    def _carry(self, ask: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        assert self._group is not None
        try:
            ask(self._group).wait()
        except RuntimeError as error:
            raise RankLost(f"a rank of this instance is lost: {error}", self._why) from error


def _gloo(
    store: dist.Store, rank: int, size: int, device: torch.device, patience: timedelta
) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    # Not the interface of the host's name, which containers may lack, and others reach.
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_LOOPBACK)]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    return _grouped(store, rank, size, torch.device("cpu"), "GLOO", backend)


def _nccl(
    store: dist.Store, rank: int, size: int, device: torch.device, patience: timedelta
) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return _grouped(store, rank, size, device, "NCCL", backend)


def _grouped(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    name: str,
    backend: dist.Backend,
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
    kind = getattr(dist.ProcessGroup.BackendType, name)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
