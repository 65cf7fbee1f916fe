"""Starts the instances and the front, and tells people what they have."""

import asyncio
import gc
import logging
import os
import socket
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kunserve.cluster.api import EngineClient
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import Launcher
from kunserve.core.config import MIB, KunServeConfig
from kunserve.core.errors import ConfigError
from kunserve.core.extras import find_extra
from kunserve.core.kv_blocks import ring_of
from kunserve.core.messages import Ready
from kunserve.engine.cpu.kernels.build import find_or_build
from kunserve.engine.memory.copy_rate import measure_copy_rate
from kunserve.engine.memory.free_memory import available_bytes
from kunserve.engine.torch.cuda.cards import with_shares
from kunserve.model.config import read_spec
from kunserve.model.generation_config import SamplingDefaults, read_sampling_defaults
from kunserve.model.profile import ProfileSubject, find_cost
from kunserve.model.quantization import kept_layer_bytes, kept_quantization
from kunserve.model.sharding import check_shardable, spread_over_ranks
from kunserve.model.source import resolve_model
from kunserve.model.spec import ModelSpec, period_of
from kunserve.policy.batch.cost import assumed_cost
from kunserve.server.api.chat_templates import read_chat_template
from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.tls import check_certificates
from kunserve.server.start.app import create_app
from kunserve.server.start.launch_parts import load_tokenizer, tracer_of
from kunserve.server.start.serve import serve

logger = logging.getLogger("kunserve.server")


@dataclass(frozen=True, slots=True)
class Launched:
    """A cluster that serves, and what stands before it."""

    cluster: EngineClient
    tokenizer: Any
    defaults: SamplingDefaults
    config: KunServeConfig
    """The configuration, with what was measured at the start."""

    @property
    def model_name(self) -> str:
        """The first of its names, which is in answers and metrics."""
        return (*self.config.model.served_model_name, self.config.model.model)[0]


async def launch(config: KunServeConfig, run_folder: Path | None = None) -> Launched:
    """Start the instances. Raises ConfigError when they cannot start; the caller closes them.

    ``run_folder`` is where they outlive this process, see ``LocalCluster.start``.
    """
    template = config.chat.chat_template and read_chat_template(config.chat.chat_template)
    source = resolve_model(config.model.model, config.model.load_format)
    spec = read_spec(source, config.model.dtype)
    check_length(config, spec)
    defaults = SamplingDefaults()
    if config.model.generation_config == "auto":
        defaults = read_sampling_defaults(source)
    if defaults != SamplingDefaults():
        logger.info("sampling defaults of the model: %s", defaults.shown)
    config = with_ring(config, spec)
    num_ranks = config.instance.tensor_parallel_size
    if num_ranks > 1:
        check_shardable(spread_over_ranks(spec, config.instance), num_ranks)
    if config.cluster.launcher == "local":  # elsewhere each instance has its GPUs to itself
        config = with_shares(config, spec)
    keeps = config.instance.device == "cpu" and num_ranks == 1
    kept = kept_quantization(source, config.model, keeps=keeps)
    layer_bytes = None if kept is None else kept_layer_bytes(source, spec)
    config = with_swap(with_costs(config, spec, kept, layer_bytes))
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
    # Here, because every instance would compile them otherwise.
    logger.info("kernels file=%s", (await asyncio.to_thread(find_or_build)).name)
    tokenizer_loading = asyncio.create_task(
        asyncio.to_thread(load_tokenizer, source, config.model.tokenizer, template)
    )
    cluster = await LocalCluster.start(
        config,
        vocab_size=spec.vocab_size,
        launcher=launcher,
        run_folder=run_folder,
        on_ready=_log_ready,
    )
    try:
        return Launched(cluster, await tokenizer_loading, defaults, config)
    except BaseException:
        await cluster.close()
        raise


async def run_server(config: KunServeConfig) -> None:
    """Serve until a signal. Raises ConfigError when it cannot start."""
    began_s = time.monotonic()
    ApiKeys.of(config.server)
    check_certificates(config.server)
    tracer = None if config.server.api_server_count > 1 else tracer_of(config)
    listener = _listen(config.server.host, config.server.port)
    host, port = listener.getsockname()[:2]
    launched = await launch(config, _run_folder(config))
    cluster, name, config = launched.cluster, launched.model_name, launched.config

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


def check_length(config: KunServeConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a longest request that the model was not made for."""
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {spec.max_position} tokens that the model "
            "was trained for"
        )


def with_ring(config: KunServeConfig, spec: ModelSpec) -> KunServeConfig:
    """The configuration with a ring for KV of layers with a window, if it is wanted.

    Raises ConfigError for a model that has no such layers, or another pattern of them.
    """
    instance = config.instance
    if instance.disable_hybrid_kv_cache_manager:
        return config
    period, step_tokens = period_of(spec), config.scheduler.max_num_batched_tokens
    assert spec.sliding_window is not None, spec
    ring = ring_of(spec.sliding_window, period, instance.block_size, step_tokens)
    logger.info(
        "layers with a window keep KV of %d tokens: %d of the window, %d of a step "
        "(--max-num-batched-tokens), and parts of blocks; stages end after every %d layers",
        ring.num_blocks * instance.block_size,
        spec.sliding_window,
        step_tokens,
        period,
    )
    return replace(config, instance=replace(instance, kv_ring=ring))


def with_costs(
    config: KunServeConfig,
    spec: ModelSpec,
    quantization: str | None = None,
    layer_bytes: float | None = None,
) -> KunServeConfig:
    """The configuration with the costs that batch formation predicts by, and a line about them.

    From the profile if there is one, else assumed from the model's shape: measuring at start
    would take longer than loading the model. ``layer_bytes`` is what a layer's quantised weights
    take. Raises ConfigError for a profile that does not fit.
    """
    scheduler, instance = config.scheduler, config.instance
    is_used = (
        scheduler.lookahead or config.overload.uses_host_memory or scheduler.tpot_slo_s is not None
    )
    if not is_used or scheduler.cost is not None:
        return config
    subject = ProfileSubject.of(
        spec,
        instance.num_threads,
        instance.block_size,
        quantization,
        instance.tensor_parallel_size,
    )
    path = None if scheduler.profile is None else Path(scheduler.profile)
    cost, origin = None, "no --profile of a GPU (`kunserve profile --device cuda` makes one)"
    if path is not None or instance.device == "cpu":  # the usual place has profiles of CPUs
        cost, origin = find_cost(subject, path)
    if cost is None and scheduler.tpot_slo_s is not None:
        raise ConfigError(f"--tpot-slo needs measured step times; there is {origin}")
    if cost is None and config.overload.uses_host_memory and instance.device != "cpu":
        raise ConfigError(
            f"with --device {instance.device}, KV goes to host memory at the pace of measured step "
            f"times; there is {origin}"
        )
    if cost is None:
        logger.info("step costs assumed from the model's shape: %s", origin)
        cost = assumed_cost(spec, layer_bytes)
    else:
        logger.info("step costs profile=%s", origin)
    return replace(config, scheduler=replace(scheduler, cost=cost))


def with_swap(config: KunServeConfig) -> KunServeConfig:
    """The configuration with a measured way to host memory, if the overload policy wants it.

    An instance gets as much host memory as it has for weights and KV. Beside a GPU's memory there
    may be less of the host's: half of what is available is shared out.
    """
    if not config.overload.uses_host_memory:
        return config
    device, host_bytes = config.instance.device, config.instance.memory_bytes
    if device != "cpu":
        most = max(config.cluster.num_instances, config.cluster.max_instances or 0)
        host_bytes = min(host_bytes, available_bytes() // (2 * most))
    swap = config.overload.swap_config(measure_copy_rate(device), host_bytes)
    assert swap is not None, config.overload
    logger.info(
        "swap host_memory=%d MiB each, copies %.1f GB/s",
        host_bytes // MIB,
        swap.host_bytes_per_s / 1e9,
    )
    return replace(config, scheduler=replace(config.scheduler, swap=swap))


def _run_folder(config: KunServeConfig) -> Path | None:
    """Where the next server at the same address looks for this one's instances.

    None if it could not: a free port is another one each time.
    """
    host, port = config.server.host, config.server.port
    if port == 0 or config.cluster.front_grace_s == 0.0:
        return None
    name = f"kunserve-{os.getuid()}-{host}-{port}".replace("/", "-")
    return Path(tempfile.gettempdir()) / name


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
