"""Starts the instances and the front, and tells people what they have."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kunserve.cluster.api import EngineClient
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import Launcher
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError, KunServeError
from kunserve.core.extras import find_extra
from kunserve.core.messages import Ready
from kunserve.core.snapshots import InstanceSpec
from kunserve.engine.cpu.kernels.build import find_or_build
from kunserve.model.config import read_spec
from kunserve.model.generation_config import SamplingDefaults, read_sampling_defaults
from kunserve.model.packed import KEPT_ON_CPUS, KEPT_ON_DEVICES, NOTHING_KEPT, Kept
from kunserve.model.quantization import kept_layer_bytes, kept_quantization
from kunserve.model.source import ModelSource, resolve_model
from kunserve.model.spec import ModelSpec
from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.tls import check_certificates
from kunserve.server.start.app import create_app
from kunserve.server.start.launch_parts import load_tokenizer, tracer_of
from kunserve.server.start.plan import idle_cores, make_plan, shared_weights_line
from kunserve.server.start.serve import serve

logger = logging.getLogger("kunserve.server")


@dataclass(frozen=True, slots=True)
class Launched:
    """A cluster that serves, and what stands before it."""

    cluster: EngineClient
    tokenizer: Any
    defaults: SamplingDefaults
    config: KunServeConfig

    @property
    def model_name(self) -> str:
        """The first of its names, which is in answers and metrics."""
        return (*self.config.model.served_model_name, self.config.model.model)[0]


def _keeps(config: KunServeConfig) -> Kept:
    """What the instances compute with as it is stored. Of GPUs that are not here, what most do."""
    instance = config.instance
    if instance.tensor_parallel_size > 1:
        return NOTHING_KEPT
    if instance.device == "cpu":
        return KEPT_ON_CPUS
    if config.cluster.launcher != "local":
        return KEPT_ON_DEVICES
    kept: Kept = find_extra("cards", "cuda", f"--device {instance.device}").find_kept(config)
    return kept


def _kept_of(
    config: KunServeConfig, source: ModelSource, spec: ModelSpec
) -> tuple[str | None, float | None]:
    """How weights stay quantised in memory, and what a layer's take then, if they do."""
    keeps = _keeps(config)
    kept = kept_quantization(source, config.model, keeps)
    return kept, None if kept is None else kept_layer_bytes(source, spec, keeps)


async def launch(config: KunServeConfig, run_folder: Path | None = None) -> Launched:
    """Start the instances. Raises ConfigError when they cannot start; the caller closes them.

    ``run_folder`` is where they outlive this process, see ``LocalCluster.start``.
    """
    source = resolve_model(config.model.model, config.model.load_format)
    spec = _spec_of(config, source)
    defaults = SamplingDefaults()
    if config.model.generation_config == "auto":
        defaults = read_sampling_defaults(source)
    if defaults != SamplingDefaults():
        logger.info("sampling defaults of the model: %s", defaults.shown)
    num_ranks = config.instance.tensor_parallel_size
    kept, layer_bytes = _kept_of(config, source, spec)
    plan = make_plan(config, spec, kept, layer_bytes)
    launcher = await asyncio.to_thread(_launcher, config, run_folder)
    logger.info(
        "starting model=%s dtype=%s quantization=%s instances=%d ranks_per_instance=%d "
        "threads_per_instance=%d",
        config.model.model,
        config.model.dtype,
        kept or "none",
        config.cluster.num_instances,
        num_ranks,
        max(num_ranks, config.instance.num_threads),
    )
    hint = idle_cores(config, len(os.sched_getaffinity(0)))
    if hint is not None:
        logger.info("%s", hint)
    # Here, because every instance would compile them otherwise.
    logger.info("kernels file=%s", (await asyncio.to_thread(find_or_build)).name)
    specs: list[InstanceSpec] = []

    def note_ready(ready: Ready) -> None:
        logger.info("instance ready instance=%d %s", ready.spec.instance_id, ready.summary)
        specs.append(ready.spec)

    starting = asyncio.create_task(
        LocalCluster.start(
            plan,
            vocab_size=spec.vocab_size,
            launcher=launcher,
            run_folder=run_folder,
            on_ready=note_ready,
        )
    )
    try:
        cluster, tokenizer = await asyncio.gather(
            starting, asyncio.to_thread(load_tokenizer, source, config)
        )
    except BaseException:  # before the weights are loaded, if it is the tokenizer
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, KunServeError):
            await (await starting).close()
        raise
    shared = shared_weights_line(specs)
    if shared is not None:
        logger.info("%s", shared)
    return Launched(cluster, tokenizer, defaults, config)


def _spec_of(config: KunServeConfig, source: ModelSource) -> ModelSpec:
    """The model's shape. What its engine cannot do is refused here, before anything starts."""
    engine = config.instance.engine
    if engine != "own":
        find_extra("engine_checks", engine, f"--engine {engine}")(config, source)
    return read_spec(source, config.model.dtype, computed_elsewhere=engine != "own")


async def run_server(config: KunServeConfig) -> None:
    """Serve until a signal. Raises ConfigError when it cannot start."""
    began_s = time.monotonic()
    ApiKeys.of(config.server)
    check_certificates(config.server)
    tracer = None if config.server.api_server_count > 1 else tracer_of(config)
    listener = _listen(config.server.host, config.server.port)
    host, port = listener.getsockname()[:2]
    launched = await launch(config, _run_folder(config))
    cluster, name = launched.cluster, launched.model_name

    def tell_ready() -> None:
        logger.info(
            "ready url=%s://%s:%d/v1 model=%s max_model_len=%d seconds=%.1f",
            "http" if config.server.ssl_certfile is None else "https",
            host,
            port,
            name,
            cluster.limits.max_model_len,
            time.monotonic() - began_s,
        )
        gc.freeze()
        gc.enable()

    try:
        if config.server.api_server_count > 1:
            serve_by_several = find_extra("fronts", "several", "--api-server-count")
            await serve_by_several(launched, listener, tell_ready)
        else:
            app = create_app(
                cluster, launched.tokenizer, name, config, defaults=launched.defaults, tracer=tracer
            )
            tell_ready()
            await serve(app, config, sockets=[listener])
    finally:
        await cluster.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _launcher(config: KunServeConfig, run_folder: Path | None = None) -> Launcher | None:
    """Ray's, if it was asked for; its packages are imported only then."""
    if config.cluster.launcher == "local":
        return None
    launcher: Launcher = find_extra("launchers", "ray", "--cluster ray")(config, run_folder)
    return launcher


def _run_folder(config: KunServeConfig) -> Path | None:
    """Where the next server at the same address looks for this one's instances.

    None if it could not: a free port is another one each time.
    """
    host, port = config.server.host, config.server.port
    if port == 0 or config.cluster.front_grace_s == 0.0:
        return None
    name = f"kunserve-{os.getuid()}-{host}-{port}".replace("/", "-")
    return Path(tempfile.gettempdir()) / name


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
