"""Starting one instance's process: what it is told, and how it says that it cannot start."""

import asyncio
import os
import sys
from dataclasses import dataclass

import msgspec

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
    A KV size without a memory size says too little before the model is known.
    """
    num, instance = config.cluster.num_instances, config.instance
    if instance.kv_cache_memory_bytes is not None:
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


async def start_instance(order: InstanceOrder) -> asyncio.subprocess.Process:
    """Spawn (never fork) the process and hand it its order."""
    module = "instance_main" if order.fake is None else "fake_main"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"kunserve.cluster.{module}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=process_environment(order.config.instance.num_threads),
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order))
    await process.stdin.drain()
    process.stdin.close()
    return process
