"""Starting one instance's process: what it is told, and how it says that it cannot start."""

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Protocol

import msgspec

from kunserve.cluster.instance.lease import LeaseTerms
from kunserve.cluster.processes.process_mark import FoundProcess, mark_of, open_marked
from kunserve.cluster.processes.run_folder import RunFolder
from kunserve.cluster.processes.seat import Seat
from kunserve.cluster.processes.weights_files import WeightsFiles
from kunserve.control.cluster.requests.quarantine import Blame, blame_of
from kunserve.core.config import MIB, InstanceConfig, KunServeConfig
from kunserve.core.errors import ConfigError, StartupFailure, TooLittleMemory
from kunserve.core.faults import Fault, fault_of_exit
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.plan import Plan
from kunserve.engine.memory.free_memory import (
    ENGINE_BYTES,
    PROCESS_BYTES,
    available_bytes,
    front_bytes_left,
    held_bytes,
)
from kunserve.transport.children.child import Child, Mortal
from kunserve.transport.wire.network import FrontPlace, Network

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """An instance with no model: the protocol, the memory and the timing are real."""

    module: str
    """What Python runs in the instance's process: it has the body."""
    num_layers: int = 8
    vocab_size: int = 1000
    kv_blocks: int = 256
    """Blocks of all layers that the undropped memory holds."""
    layer_bytes: int = 64 * 1024
    granule_bytes: int = 4096
    step_s: float = 0.002
    """How long a step over all layers takes."""


@dataclass(frozen=True, slots=True)
class InstanceOrder:
    """Everything an instance process needs, written to its standard input as a line of JSON.

    Not by the codec: an order is said once, lines end by themselves, and people can read it.
    """

    instance_id: InstanceId
    fake: FakeSettings | None
    """None: the real engine on CPU."""
    front_address: str
    socket_folder: str
    """Where its own sockets are bound."""
    plan: Plan
    lease: LeaseTerms | None = None
    """None: it dies with its front."""
    parent_pid: int | None = None
    """The parent that it dies with; another parent means that this one has died already. None:
    with a lease it outlives its parent."""
    model_files: str | None = None
    """The fingerprint of the files to load; others are refused."""
    place: Place = ONE_HOST
    network: Network | None = None
    """None: every process of the cluster is on this machine."""
    weights_fds: tuple[int, ...] = ()
    """Descriptors of the process: for each of its ranks, weights that it shares with others."""


def startup_error(instance_id: InstanceId, reason: str, said: bytes) -> ConfigError:
    """Why a process did not come to serve."""
    try:
        return msgspec.json.decode(said, type=StartupFailure).to_error()
    except msgspec.MsgspecError:
        return ConfigError(f"instance {instance_id} did not start: {reason}")


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a process that fails writes there before its end, as JSON."""

    fault: Fault
    request_ids: tuple[RequestId, ...] = ()
    """Of the step that failed."""


def blame_for(exit_code: int | None, said: bytes) -> Blame:
    """Whether a process that ended may have died of what it ran."""
    try:
        last = msgspec.json.decode(said, type=LastWords)
    except msgspec.MsgspecError:
        return blame_of(fault_of_exit(exit_code))
    return blame_of(last.fault, last.request_ids)


def check_memory(config: KunServeConfig) -> None:
    """Log what the whole server needs; raise TooLittleMemory when that is more than there is.

    Each instance checks for itself too, but they start at once and none sees the others' memory
    yet. A cluster that may grow starts though there is no room for all that it may grow by: each
    time it grows, ``check_growth`` looks.
    """
    num, instance = config.cluster.num_instances, config.instance
    if not _is_memory_known(config):
        return
    num_fronts = config.server.api_server_count
    front_bytes = front_bytes_left(num_fronts)
    fronts = f" and {num_fronts} fronts (--api-server-count)" if num_fronts > 1 else ""
    beside_bytes = _beside_bytes(instance)
    needed = num * (instance.memory_bytes + beside_bytes) + front_bytes
    available = available_bytes()
    if needed > available:
        raise TooLittleMemory(
            f"{num} instances of {instance.memory_bytes / MIB:.0f} MiB (--instance-memory), "
            f"about {beside_bytes / MIB:.0f} MiB beside each and {front_bytes / MIB:.0f} MiB more "
            f"for this process{fronts} need {needed / MIB:.0f} MiB; the machine, or this process's "
            f"cgroup, has {available / MIB:.0f} MiB left"
        )
    logger.info(
        "memory needed=%.0fMiB (each of %d instances: %.0f and %.0f beside it) available=%.0fMiB",
        needed / MIB,
        num,
        instance.memory_bytes / MIB,
        beside_bytes / MIB,
        available / MIB,
    )
    most = config.cluster.max_instances or num
    num_fit = (available - front_bytes) // (instance.memory_bytes + beside_bytes)
    if num_fit < most:
        logger.warning(
            "there is memory for %d instances only, so the cluster cannot grow to the %d that "
            "--max-instances allows",
            num_fit,
            most,
        )


def check_growth(plan: Plan, num_more: int, pids: Iterable[int], weights: WeightsFiles) -> None:
    """Raise TooLittleMemory when so many instances more do not fit on this machine.

    The processes that run have been promised memory that they do not hold yet: KV blocks that
    nobody has used. It is not to be given away twice. Shared ``weights`` are there already.
    """
    if not _is_memory_known(plan.config):
        return
    instance = plan.instance
    beside_bytes = _beside_bytes(instance)
    mapped_bytes = weights.mapped_bytes(instance.tensor_parallel_size)
    sharers = instance.weight_sharers
    own_bytes = mapped_bytes // sharers if sharers else 0
    each = instance.memory_bytes - own_bytes + beside_bytes
    owed = sum(max(0, each - max(0, held_bytes(pid) - mapped_bytes)) for pid in pids)
    left = available_bytes() - owed
    if num_more * each > left:
        raise TooLittleMemory(
            f"{num_more} more of {instance.memory_bytes / MIB:.0f} MiB (--instance-memory) "
            f"and about {beside_bytes / MIB:.0f} MiB beside each need {num_more * each / MIB:.0f} "
            f"MiB; the machine, or this process's cgroup, has {max(0, left) / MIB:.0f} MiB left "
            "beside what the running instances may still take"
        )


def _beside_bytes(instance: InstanceConfig) -> int:
    """About what an instance's processes take beside its memory."""
    more_bytes = 0 if instance.engine == "own" else ENGINE_BYTES
    return instance.tensor_parallel_size * PROCESS_BYTES + more_bytes


def _is_memory_known(config: KunServeConfig) -> bool:
    """A KV size without a memory size says too little before the model is known, and another
    device's memory is not the machine's.
    """
    return config.instance.kv_cache_memory_bytes is None and config.instance.device == "cpu"


def process_environment(num_threads: int) -> dict[str, str]:
    """Thread pools sized before any library reads the environment."""
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    return {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE"}


class InstanceProcess(Mortal, Protocol):
    """One instance's process, wherever it runs. Many may wait for its end."""

    @property
    def pid(self) -> int:
        """Its number on its machine."""
        ...

    @property
    def mark(self) -> str:
        """By which its launcher finds it again."""
        ...

    @property
    def said(self) -> bytes:
        """What it wrote to standard output: ``StartupFailure`` or ``LastWords``.

        Known once it has ended.
        """
        ...

    @property
    def exit_code(self) -> int | None:
        """The negative signal if one ended it; None if it runs, or if nobody can know."""
        ...

    @property
    def public_key(self) -> str | None:
        """If it was made beside the process, and not with its order."""
        ...

    def follow(self, front: FrontPlace) -> None:
        """Its front is another one now. On one machine it sees that by itself."""
        ...


class Launcher(Protocol):
    """Starts instances, here or on another machine, and finds those of an earlier front.

    On a network it fills in where a process goes: ``order.network.host``, and ``order.place``.
    """

    @property
    def front_host(self) -> str | None:
        """Address of this machine by which instances reach the front. None: all of them are here,
        and sockets are files.
        """
        ...

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        """Start a process that carries out the order. Raises OSError when it cannot."""
        ...

    async def seat(self, folder: Path, grace_s: float) -> Seat:
        """The seat of the cluster's front, taken. Raises ConfigError when another front has it.

        ``folder`` is where it is if all fronts of the cluster are on this machine. Its instances
        outlive a front by ``grace_s``.
        """
        ...

    async def find(
        self, marks: Mapping[InstanceId, str], epoch: int
    ) -> dict[InstanceId, InstanceProcess]:
        """Those of these processes that run, whoever started them. The front of this epoch is the
        one that may end them from now on.
        """
        ...

    def check_start(self, config: KunServeConfig, fake: FakeSettings | None) -> None:
        """Raise ConfigError when there is no room for such a cluster."""
        ...

    def check_growth(
        self, plan: Plan, fake: FakeSettings | None, num_more: int, pids: Iterable[int]
    ) -> None:
        """Raise ConfigError when so many more do not fit beside the processes that run."""
        ...

    def close(self) -> None:
        """Nothing is started any more: whoever waits in ``start`` gets an OSError at once."""
        ...


class LocalLauncher:
    """Spawns (never forks) processes on this machine."""

    front_host: str | None = None

    def __init__(self, program: Sequence[str] | None = None) -> None:
        """``program`` is what Python runs instead of the instance's own entry point."""
        self._program = program
        self._weights = WeightsFiles()

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        """Spawn the process and hand it its order."""
        if order.fake is None:
            fds = self._weights.fds_of(order.instance_id, order.plan, order.model_files)
            order = replace(order, weights_fds=fds)
        return LocalProcess(order, self._program)

    async def seat(self, folder: Path, grace_s: float) -> Seat:
        """The folder's lock."""
        return RunFolder(folder)

    async def find(
        self, marks: Mapping[InstanceId, str], epoch: int
    ) -> dict[InstanceId, InstanceProcess]:
        """Those that have not ended. The lock keeps earlier fronts away from them."""
        found = find_here(marks)
        self._weights.find(process.pid for process in found.values())
        return found

    def check_start(self, config: KunServeConfig, fake: FakeSettings | None) -> None:
        """See ``check_memory``. A fake instance takes next to nothing."""
        if fake is None:
            check_memory(config)

    def check_growth(
        self, plan: Plan, fake: FakeSettings | None, num_more: int, pids: Iterable[int]
    ) -> None:
        """See ``check_growth``."""
        if fake is None:
            check_growth(plan, num_more, pids, self._weights)

    def close(self) -> None:
        """A start here waits for nobody."""
        self._weights.close()


def find_here(marks: Mapping[InstanceId, str]) -> dict[InstanceId, InstanceProcess]:
    """Those of these processes of this machine that have not ended."""
    found: dict[InstanceId, InstanceProcess] = {}
    for instance_id, mark in marks.items():
        fd = open_marked(mark)
        if fd is not None:
            found[instance_id] = FoundProcess(mark, fd)
    return found


class LocalProcess(Child):
    """A child that carries out an order. Implements ``InstanceProcess`` in an event loop."""

    public_key: str | None = None

    def __init__(
        self,
        order: InstanceOrder,
        program: Sequence[str] | None = None,
        within: Sequence[str] = (),
        *,
        tells_moves: bool = False,
    ) -> None:
        """``program`` is what Python runs instead of the instance's own entry point.

        ``within`` is a command that runs the rest of its line. ``tells_moves``: its standard input
        stays open for ``follow``.
        """
        module = "kunserve.cluster.instance.main" if order.fake is None else order.fake.module
        # A file takes what nobody reads before the end; a pipe that is full would stop the child.
        self._words = FileIO(os.memfd_create("words"))
        super().__init__(
            program or ("-m", module),
            within=within,
            fds=order.weights_fds,
            stdin=subprocess.PIPE,
            stdout=self._words,
            environment=process_environment(order.plan.config.instance.num_threads),
        )
        stdin = self._process.stdin
        assert stdin is not None
        self._stdin = stdin
        self.said = b""
        self.mark = mark_of(self.pid) or f"{self.pid}:gone"
        self.watched()
        self._tell(order)
        if not tells_moves:
            self._stdin.close()

    async def _see_end(self, fd: int) -> int:
        with self._words, contextlib.closing(self._stdin):
            code = await super()._see_end(fd)
            self._words.seek(0)
            self.said = self._words.readall()
            return code

    def follow(self, front: FrontPlace) -> None:
        """Tell it on its standard input, if that is open."""
        if not self._stdin.closed:
            self._tell(front)

    def _tell(self, word: InstanceOrder | FrontPlace) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: whoever waits for it sees that
            self._stdin.write(msgspec.json.encode(word) + b"\n")
