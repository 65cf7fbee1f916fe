"""The connection to a Ray cluster. Nothing is told to anybody: no usage statistics are sent."""

import contextlib
import logging
import os
import socket
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported, or starts anything

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from kunserve.core.errors import ConfigError
from kunserve_extras.ray.nodes import Node

logger = logging.getLogger(__name__)

NAMESPACE = "kunserve"
CONNECT_S = 5.0


class Session:
    """One process's connection."""

    def __init__(self, address: str | None, host: str | None = None) -> None:
        """Connect. Raises ConfigError that says what to do where there is no cluster.

        ``host``: address of this machine among the nodes; None: as Ray has it.
        """
        self._host = host
        if address is not None:
            _check_listening(address)
        # It warns that it has set no handler of SIGTERM, which is ours to have.
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(
                address=address or "auto",
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
            _write_errors_to_our_log()
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "that this machine is a node of"
            raise ConfigError(
                f"--cluster ray: there is no Ray cluster {where} ({_first_line(error)}); start one "
                "with `ray start --head --disable-usage-stats`, or give --ray-address"
            ) from None

    @property
    def host(self) -> str:
        """Address of this machine among the nodes."""
        return self._host or str(ray.util.get_node_ip_address())

    def nodes(self) -> list[Node]:
        """Those that live."""
        return [
            Node(found["NodeManagerAddress"], found["Resources"])
            for found in ray.nodes()
            if found["Alive"]
        ]

    def actors(self, prefix: str) -> list[str]:
        """Names of all actors that begin so, whoever made them."""
        names: list[str] = ray.util.list_named_actors()
        return [name for name in names if name.startswith(prefix)]

    def request(self, bundles: list[dict[str, float]]) -> None:
        """Tell Ray's autoscaler that there shall be room for all of these."""
        request_resources(bundles=bundles)

    def close(self) -> None:
        """Disconnect; what is not detached ends."""
        ray.shutdown()


async def awaited(answer: Any) -> Any:
    """A reference of Ray's as something that a task can be made of."""
    return await answer


def end_actor(actor: Any) -> None:
    """End it at once. May be called again, and after its end."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)


def _write_errors_to_our_log() -> None:
    """Ray prints what its nodes complain of to standard output, whatever ``log_to_driver`` says,
    and has no switch for it. Where this place in it is another one, it goes on printing.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _log


def _log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    for line in data.get("lines", ()):
        logger.info("ray says %r", str(line).strip().partition("\n")[0])


def _check_listening(address: str) -> None:
    """Raise ConfigError at once where nobody listens, because Ray tries for long."""
    host, mark, port = address.removeprefix("ray://").rpartition(":")
    if not mark or not port.isdigit():
        raise ConfigError(f"--ray-address is host:port of Ray's head, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--ray-address {address}: nobody listens there ({error.strerror or error}); "
            "`ray start --head` says its address"
        ) from None


def _first_line(error: Exception) -> str:
    lines: list[Any] = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
