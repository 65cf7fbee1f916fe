"""The files in which instances of this machine share weights (``engine.memory.weights_file``).

Whoever starts instances makes them, and they inherit the descriptors. A front that takes instances
over finds the files through these.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from kunserve.engine.nodes import node_numbers, numa_nodes

_LINK = re.compile(r"/memfd:kunserve-weights-(\w+)-(\d+)-(\d+) \(deleted\)")


class _Key(NamedTuple):
    what: str
    """A digest of the settings that decide about the bytes: those of an earlier front may differ.
    """
    node: int
    rank: int


class WeightsFiles:
    """One for each NUMA node and rank."""

    def __init__(self) -> None:
        self._fds: dict[_Key, int] = {}
        self._num_nodes = len(numa_nodes())

    def fds_of(
        self, instance_id: InstanceId, plan: Plan, model_files: str | None
    ) -> tuple[int, ...]:
        """Of an instance that starts, for each of its ranks; none if its weights are its own."""
        if not plan.measured.weight_sharers:
            return ()
        num_ranks = plan.config.instance.tensor_parallel_size
        settings = msgspec.json.encode((plan.config.model, plan.instance, model_files))
        what = hashlib.sha256(settings).hexdigest()[:16]
        for key in [key for key in self._fds if key.what != what]:
            os.close(self._fds.pop(key))
        nodes = node_numbers(instance_id, num_ranks, self._num_nodes)
        return tuple(self._fd_of(_Key(what, node, rank)) for rank, node in enumerate(nodes))

    def _fd_of(self, key: _Key) -> int:
        if key not in self._fds:
            name = "-".join(map(str, ("kunserve-weights", *key)))
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._fds[key] = os.memfd_create(name, flags)
        return self._fds[key]

    def find(self, pids: Iterable[int]) -> None:
        """Know what these processes share."""
        for folder in (f"/proc/{pid}/fd" for pid in pids):
            names: list[str] = []
            with suppress(OSError):  # it has ended
                names = os.listdir(folder)
            for path in (f"{folder}/{name}" for name in names):
                with suppress(OSError):  # it has closed this one meanwhile
                    self._look_at(path)

    def _look_at(self, path: str) -> None:
        if (match := _LINK.fullmatch(os.readlink(path))) is not None:
            key = _Key(match[1], int(match[2]), int(match[3]))
            if key not in self._fds:
                self._fds[key] = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def mapped_bytes(self, num_ranks: int) -> int:
        """What each instance has mapped of them. One that joins needs no memory for it."""
        num_bytes = sum(os.fstat(fd).st_blocks * 512 for fd in self._fds.values())
        return num_bytes * num_ranks // max(1, len(self._fds))

    def close(self) -> None:
        """The files end with the instances that have them."""
        while self._fds:
            os.close(self._fds.popitem()[1])
