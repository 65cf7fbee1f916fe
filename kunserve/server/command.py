"""``kunserve serve``: from flags to a running server."""

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import click
import uvloop

from kunserve.core.config import (
    MIB,
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    ModelConfig,
    OverloadConfig,
    SchedulerConfig,
    ServerConfig,
)
from kunserve.core.errors import KunServeError
from kunserve.server.foreign_flags import ServeCommand
from kunserve.server.launch import run_server

_F = TypeVar("_F", bound=Callable[..., Any])
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType[int]):
    """A number of bytes with an optional unit: ``800MiB``, ``1.5g``, ``1073741824``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes, or a usage error that says what is accepted."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*([\d.]+)\s*([bkmgt]?)(i?b)?\s*", str(value).lower())
        if match is None or match[1].count(".") > 1 or match[1] == ".":
            self.fail(f"{value!r} is no size; write for example 800MiB or 1.5GiB", param, ctx)
        size_bytes = int(float(match[1]) * _SIZES[match[2]])
        if match[2] == "" and match[3] is None and size_bytes < MIB:
            self.fail(f"{value} bytes are too few; write {value}MiB if you mean that", param, ctx)
        return size_bytes


CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}
EXAMPLES = "\b\n" + "\n".join(
    (
        "Examples:",
        "  kunserve serve smollm2-135m",
        "  kunserve serve ./Qwen2.5-0.5B --num-instances 2 --instance-memory 2GiB",
        "  kunserve serve smollm2-135m --load-format dummy --overload-policy recompute",
    )
)
_MODEL, _INSTANCE, _SCHEDULER = ModelConfig(), InstanceConfig(), SchedulerConfig()
_OVERLOAD, _CLUSTER, _SERVER = OverloadConfig(), ClusterConfig(), ServerConfig()


def _options(*decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    def apply(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _flag(name: str, default: Any, text: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(name, default=default, show_default=default is not None, help=text, **more)


_model_options = _options(
    _flag("--tokenizer", _MODEL.tokenizer, "Folder or hub id of the tokenizer [the model's own]."),
    _flag("--served-model-name", _MODEL.served_model_name, "Name in the API [MODEL]."),
    _flag("--dtype", _MODEL.dtype, "Weights and KV.", type=click.Choice(["bfloat16", "float32"])),
    _flag(
        "--load-format",
        _MODEL.load_format,
        "How weights are read; dummy makes random ones.",
        type=click.Choice(["auto", "safetensors", "gguf", "dummy"]),
    ),
    _flag(
        "--seed",
        _MODEL.seed,
        "For dummy weights, and for requests that bring no seed.",
        type=int,
    ),
    _flag(
        "--generation-config",
        _MODEL.generation_config,
        "Defaults of sampling: auto takes the model's generation_config.json, vllm neutral ones.",
        type=click.Choice(["auto", "vllm"]),
    ),
    _flag(
        "--max-model-len",
        _MODEL.max_model_len,
        "Longest prompt plus output in tokens [what model and memory allow].",
        type=click.IntRange(min=1),
    ),
)

_instance_options = _options(
    _flag("--num-instances", _CLUSTER.num_instances, "Replicas.", type=click.IntRange(1, 64)),
    _flag(
        "--instance-memory",
        f"{_INSTANCE.memory_bytes // MIB}MiB",
        "Memory of each instance for weights and KV together.",
        type=ByteSize(),
    ),
    _flag(
        "--kv-cache-memory-bytes",
        _INSTANCE.kv_cache_memory_bytes,
        "KV memory of each instance; overrides --instance-memory.",
        type=ByteSize(),
    ),
    _flag(
        "--block-size", _INSTANCE.block_size, "Tokens in a KV block.", type=click.IntRange(1, 256)
    ),
    _flag(
        "--num-threads",
        _INSTANCE.num_threads,
        "Compute threads of each instance.",
        type=click.IntRange(1, 256),
    ),
    _flag(
        "--attention",
        _INSTANCE.attention,
        "reference is slow and plain, for comparison.",
        type=click.Choice(["fused", "reference"]),
    ),
    _flag(
        "--max-num-seqs",
        _SCHEDULER.max_num_seqs,
        "Requests that run at once, per group.",
        type=click.IntRange(min=1),
    ),
    _flag(
        "--max-num-batched-tokens",
        _SCHEDULER.max_num_batched_tokens,
        "Tokens in one step.",
        type=click.IntRange(min=1),
    ),
    click.option(
        "--lookahead/--no-lookahead",
        default=_SCHEDULER.lookahead,
        help="In a pipeline, balance microbatches by predicted time over the whole queue.",
    ),
    _flag(
        "--profile",
        _SCHEDULER.profile,
        "Costs measured by `kunserve profile` [where it writes by default].",
    ),
    _flag(
        "--trace-out",
        _CLUSTER.trace_out,
        "Write steps, transfers and transitions there at the end (for Perfetto).",
    ),
    _flag(
        "--start-timeout",
        _CLUSTER.start_timeout_s,
        "Seconds until every instance must be ready.",
        type=click.FloatRange(min=0, min_open=True),
    ),
    _flag(
        "--hang-timeout",
        _CLUSTER.hang_timeout_s,
        "Replace an instance whose loop stands still so many seconds (and ten longest steps).",
        type=click.FloatRange(min=0, min_open=True),
    ),
    _flag(
        "--front-grace",
        _CLUSTER.front_grace_s,
        "Seconds that instances outlive this process, so that the same command, given again, "
        "serves without loading weights.",
        type=click.FloatRange(min=0),
    ),
    click.option(
        "--check-invariants",
        is_flag=True,
        help="Check every part's invariants whenever idle (slow; for the hunt of bugs).",
    ),
)

_overload_options = _options(
    _flag(
        "--overload-policy",
        _OVERLOAD.policy,
        "When KV memory runs out: drop frees replicated layers, recompute preempts requests.",
        type=click.Choice(["recompute", "drop"]),
    ),
    _flag(
        "--restore-below",
        _OVERLOAD.restore_below,
        "Restore when demand is under this share of the undropped KV memory.",
        type=click.FloatRange(0.0, 1.0),
    ),
    _flag(
        "--max-group-size",
        _OVERLOAD.max_group_size,
        "Most instances that may share one copy of the weights [no limit].",
        type=click.IntRange(min=2),
    ),
    _flag(
        "--min-deep-gain",
        _OVERLOAD.min_deep_gain,
        "Memory that a pipeline of more than two stages must add, as a share of what it had.",
        type=click.FloatRange(0.0),
    ),
    _flag(
        "--link-gbps",
        _OVERLOAD.link_gbps,
        "Limit bulk transfers between instances, to study their cost.",
        type=click.FloatRange(min=0, min_open=True),
    ),
)

_server_options = _options(
    _flag("--host", _SERVER.host, "Address to listen on."),
    _flag("--port", _SERVER.port, "0 picks a free one.", type=click.IntRange(0, 65535)),
    _flag("--api-key", _SERVER.api_key, "Clients must send it as a Bearer token."),
    _flag(
        "--max-num-queued-reqs",
        _SERVER.max_num_queued_reqs,
        "Waiting requests beyond which new ones get 503 [no limit].",
        type=click.IntRange(min=1),
    ),
    _flag(
        "--max-num-queued-tokens",
        _SERVER.max_num_queued_tokens,
        "Waiting prompt tokens beyond which new requests get 503 [no limit].",
        type=click.IntRange(min=1),
    ),
    _flag(
        "--max-connections",
        _SERVER.max_connections,
        "Connections served at once.",
        type=click.IntRange(min=1),
    ),
    _flag(
        "--request-timeout",
        _SERVER.request_timeout_s,
        "Seconds after which a request that has not ended ends with an error [no limit].",
        type=click.FloatRange(min=0, min_open=True),
    ),
    _flag(
        "--shutdown-timeout",
        _SERVER.shutdown_timeout_s,
        "Seconds that SIGTERM waits for requests under way.",
        type=click.FloatRange(min=0),
    ),
    click.option(
        "--enable-admin",
        is_flag=True,
        help="Let POST /kunserve/drop, /kunserve/restore and /kunserve/kill act.",
    ),
)


@click.command("serve", cls=ServeCommand, context_settings=CONTEXT, epilog=EXAMPLES)
@click.argument("model", default=_MODEL.model)
@_model_options
@_instance_options
@_overload_options
@_server_options
def serve_command(**flags: Any) -> None:
    """Serve MODEL over several instances behind one OpenAI-compatible address.

    MODEL is smollm2-135m (built in), a Hugging Face folder or hub id, or a .gguf file.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        uvloop.run(run_server(config_from_flags(flags)))
    except KunServeError as error:
        raise click.ClickException(str(error)) from None


_RENAMED = {
    "instance_memory": "memory_bytes",
    "overload_policy": "policy",
    "start_timeout": "start_timeout_s",
    "hang_timeout": "hang_timeout_s",
    "front_grace": "front_grace_s",
    "shutdown_timeout": "shutdown_timeout_s",
    "request_timeout": "request_timeout_s",
}


def config_from_flags(flags: dict[str, Any]) -> KunServeConfig:
    """Each flag into the field of the same name, wherever in the tree that is."""
    left = {_RENAMED.get(name, name): value for name, value in flags.items()}
    tree = KunServeConfig()
    parts: dict[str, Any] = {}
    for part in fields(tree):
        branch = getattr(tree, part.name)
        mine = {f.name: left.pop(f.name) for f in fields(branch) if f.name in left}
        parts[part.name] = replace(branch, **mine)
    assert not left, f"flags that set nothing: {sorted(left)}"
    return KunServeConfig(**parts)
