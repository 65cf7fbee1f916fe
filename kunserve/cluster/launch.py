"""Starting one instance's process: what it is told, and how it says that it cannot start."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kunserve.cluster.lease import LeaseTerms
from kunserve.cluster.process_mark import FoundProcess, mark_of, open_marked
from kunserve.core.config import MIB, KunServeConfig
from kunserve.core.errors import ConfigError, ModelFiles, TooLittleMemory, UnsupportedModel
from kunserve.core.ids import InstanceId
from kunserve.engine.free_memory import available_bytes

_ERRORS: dict[str, type[ConfigError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelFiles, TooLittleMemory, UnsupportedModel)
}

PROCESS_BYTES = 170 * MIB
"""Of an instance beside its arena: interpreter and torch, as measured with SmolLM2."""


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """An instance with no model: the protocol, the memory and the timing are real."""

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
    """Everything an instance process needs, written to its standard input as JSON."""

    instance_id: InstanceId
    fake: FakeSettings | None
    """None: the real engine on CPU."""
    front_address: str
    socket_folder: str
    """Where its own sockets are bound."""
    config: KunServeConfig
    lease: LeaseTerms | None = None
    """None: it dies with its front."""
    front_pid: int | None = None
    """The parent that it dies with; another parent means that the front has died already."""


@dataclass(frozen=True, slots=True)
class StartupFailure:
    """What a process that cannot start writes to its standard output, as JSON."""

    error: str
    message: str

    def to_error(self) -> ConfigError:
        """The error as the front raises it."""
        return _ERRORS.get(self.error, ConfigError)(self.message)


def check_memory(config: KunServeConfig) -> None:
    """Raise TooLittleMemory when all instances together ask for more than there is.

    Each one checks for itself too, but they start at once and none sees the others' memory yet.
    A KV size without a memory size says too little before the model is known, and another
    device's memory is not the machine's.
    """
    num, instance = config.cluster.num_instances, config.instance
    if instance.kv_cache_memory_bytes is not None or instance.device != "cpu":
        return
    needed = num * (instance.memory_bytes + PROCESS_BYTES)
    available = available_bytes()
    if needed > available:
        raise TooLittleMemory(
            f"{num} instances of {instance.memory_bytes / MIB:.0f} MiB (--instance-memory) and "
            f"about {PROCESS_BYTES / MIB:.0f} MiB each for the program need "
            f"{needed / MIB:.0f} MiB; the machine, or this process's cgroup, has "
            f"{available / MIB:.0f} MiB left"
        )


def process_environment(num_threads: int) -> dict[str, str]:
    """Thread pools sized before any library reads the environment."""
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = str(num_threads)
    environment["MKL_NUM_THREADS"] = str(num_threads)
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return environment


class InstanceProcess(Protocol):
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
        """What it wrote to standard output: a ``StartupFailure``. Known once it has ended."""
        ...

    async def wait(self) -> str:
        """Wait for its end; how it ended, for people."""
        ...

    def kill(self) -> None:
        """End it at once. May be called again, and after its end."""
        ...


class Launcher(Protocol):
    """Starts instances, here or on another machine, and finds those of an earlier front."""

    async def start(self, order: InstanceOrder) -> InstanceProcess:
        """Start a process that carries out the order. Raises OSError when it cannot."""
        ...

    def find(self, mark: str) -> InstanceProcess | None:
        """The process of this mark, whoever started it; None if it has ended."""
        ...


class LocalLauncher:
    """Spawns (never forks) processes on this machine."""

    def __init__(self, program: Sequence[str] | None = None) -> None:
        """``program`` is what Python runs instead of the instance's own entry point."""
        self._program = program

    async def start(self, order: InstanceOrder) -> "LocalProcess":
        """Spawn the process and hand it its order."""
        module = "instance_main" if order.fake is None else "fake_main"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(self._program or ("-m", f"kunserve.cluster.{module}")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=process_environment(order.config.instance.num_threads),
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(order))
            await process.stdin.drain()
            process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died before it read its order: whoever waits for its end sees that
        return LocalProcess(process)

    def find(self, mark: str) -> FoundProcess | None:
        """The process of this mark, unless it has ended."""
        fd = open_marked(mark)
        return None if fd is None else FoundProcess(mark, fd)


class LocalProcess:
    """A child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._end = asyncio.create_task(self._see_end())
        self.said = b""
        self.pid = process.pid
        self.mark = mark_of(process.pid) or f"{process.pid}:gone"

    async def _see_end(self) -> str:
        assert self._process.stdout is not None
        self.said = await self._process.stdout.read()
        return f"exit code {await self._process.wait()}"

    async def wait(self) -> str:
        """Wait for its end; how it ended."""
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()
