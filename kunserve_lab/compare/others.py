"""Servers that are not ours in a comparison of the real world, at any OpenAI-compatible address.

An experiment names them in tables of their own, and lists their names among its systems::

    [others.vllm]
    description = "two replicas of vLLM, requests in turn"
    replicas = 2
    command = "$VENV/bin/vllm serve $MODEL --port {port}"

or, for servers that run already, ``urls = ["http://host-a:8000", "http://host-b:8000"]``. Each run
has prompts of its own there, of the same lengths, because such servers keep their prefix caches.
"""

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kunserve.core.config import OverloadConfig
from kunserve.core.errors import ConfigError
from kunserve_lab.bench.server_process import ServerProcess, free_ports, unwinding_on_sigterm
from kunserve_lab.compare.systems import SYSTEMS, System

LAST_LINES = 60
"""Of a replica's log, in an error: vLLM says why long before it ends."""
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class OtherServers:
    """Replicas that get requests in turn. Either ``command`` or ``urls``."""

    description: str = ""
    command: str = ""
    """Starts one replica, for each run anew. ``{port}`` is where it is to listen, ``{replica}`` its
    number from 0, ``$NAME`` a variable of the environment. No shell reads it."""
    replicas: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of a replica; ``{replica}`` and ``$NAME`` as above."""
    urls: tuple[str, ...] = ()
    """Of servers that run already."""
    ready_s: float = 300.0
    """How long a replica may take to answer ``GET /health``."""


def system_of(name: str, other: OtherServers) -> System:
    """The name and description under which tables have it: something to be better than."""
    description = other.description or other.command or ", ".join(other.urls)
    return System(name, OverloadConfig(policy="recompute"), description)


def check_others(others: Mapping[str, OtherServers], asked: tuple[str, ...]) -> None:
    """Raise ConfigError for what is seen to be impossible; variables only of those asked for."""
    for name, other in others.items():
        if name in SYSTEMS:
            raise ConfigError(f"others.{name}: a system of ours has that name")
        if bool(other.command) == bool(other.urls):
            raise ConfigError(f"others.{name}: give either a command or urls")
        if other.command and "{port}" not in other.command:
            raise ConfigError(f"others.{name}: the command must have {{port}} in it")
        if other.replicas < 1:
            raise ConfigError(f"others.{name}: replicas must be at least 1, not {other.replicas}")
        if name in asked and other.command:
            _command_of(name, other, 0, 0)


def as_called(name: str, other: OtherServers) -> OtherServers:
    """With the variables of the environment filled in: what makes two runs the same.

    Another folder may hold another version. Raises ConfigError for one that is not set.
    """
    environment = {key: _filled(name, value) for key, value in other.environment.items()}
    return replace(other, command=_filled(name, other.command), environment=environment)


@contextlib.contextmanager
def running_others(name: str, other: OtherServers) -> Generator[tuple[str, ...], None, None]:
    """Within, all replicas are ready; gives their addresses. Raises ServerUnreachable."""
    if other.urls:
        yield tuple(url.rstrip("/") for url in other.urls)
        return
    with (
        unwinding_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="kunserve-") as folder,
        contextlib.ExitStack() as stack,
    ):
        servers = []
        for replica, port in enumerate(free_ports(other.replicas)):
            command, environment = _command_of(name, other, replica, port)
            log = Path(folder) / f"{name}-{replica}.log"
            server = ServerProcess(command, port, log, environment)
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_ready(other.ready_s, LAST_LINES)
        yield tuple(server.url for server in servers)


def _command_of(
    name: str, other: OtherServers, replica: int, port: int
) -> tuple[list[str], dict[str, str]]:
    """The words of a replica's command, and its further variables. Raises ConfigError."""

    def filled(text: str) -> str:
        return _filled(name, text.replace("{port}", str(port)).replace("{replica}", str(replica)))

    try:
        words = shlex.split(other.command)
    except ValueError as error:
        raise ConfigError(f"others.{name}: the command cannot be read: {error}") from None
    environment = {key: filled(value) for key, value in other.environment.items()}
    return [filled(word) for word in words], environment


def _filled(name: str, text: str) -> str:
    return _VARIABLE.sub(lambda match: _variable(name, match[1]), text)


def _variable(name: str, variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(
            f"others.{name} uses ${variable}, which is not set: "
            f"call `{variable}=... kunserve compare FILE.toml`, or leave {name} out (--systems)"
        )
    return value
