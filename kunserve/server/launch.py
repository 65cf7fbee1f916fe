"""Starts the instances and the front, and tells people what they have."""

import logging
import socket
import time

from kunserve.cluster.local import LocalCluster
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError
from kunserve.core.messages import Ready
from kunserve.model.config import read_spec
from kunserve.model.source import resolve_model
from kunserve.model.tokenizer import load_tokenizer
from kunserve.server.app import create_app
from kunserve.server.serve import serve

logger = logging.getLogger("kunserve.server")


async def run_server(config: KunServeConfig) -> None:
    """Serve until a signal. Raises ConfigError when it cannot start."""
    began_s = time.monotonic()
    listener = _listen(config.server.host, config.server.port)
    source = resolve_model(config.model.model, config.model.load_format)
    spec = read_spec(source, config.model.dtype)
    logger.info(
        "starting model=%s dtype=%s instances=%d threads_per_instance=%d",
        config.model.model,
        config.model.dtype,
        config.cluster.num_instances,
        config.instance.num_threads,
    )
    cluster = await LocalCluster.start(config, vocab_size=spec.vocab_size, on_ready=_log_ready)
    try:
        tokenizer = load_tokenizer(source, config.model.tokenizer)
        name = config.model.served_model_name or config.model.model
        app = create_app(cluster, tokenizer, name, config)
        host, port = listener.getsockname()[:2]
        logger.info(
            "ready url=http://%s:%d/v1 model=%s max_model_len=%d seconds=%.1f",
            host,
            port,
            name,
            cluster.limits.max_model_len,
            time.monotonic() - began_s,
        )
        await serve(app, config, sockets=[listener])
    finally:
        await cluster.close()


def _log_ready(ready: Ready) -> None:
    logger.info("instance ready instance=%d %s", ready.spec.instance_id, ready.summary)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the long start, so that a taken port is told at once."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(info[0], info[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
