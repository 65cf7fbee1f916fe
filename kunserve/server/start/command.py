"""``kunserve serve``: from flags, environment and config file to a running server.

The server itself is imported when it starts, so that ``--help`` and completion are fast.
"""

import gc
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from kunserve.core.config import InstanceConfig, KunServeConfig, ModelConfig
from kunserve.core.errors import ConfigError, KunServeError
from kunserve.core.extras import extra_names, find_extra
from kunserve.server.api.parsers.reasoning import REASONING_PARSERS
from kunserve.server.api.parsers.tool_parser import TOOL_PARSERS
from kunserve.server.start.flags.config_file import read_config_file
from kunserve.server.start.flags.declared import declared_flags
from kunserve.server.start.flags.environment import set_variables, unknown_variables
from kunserve.server.start.flags.option import ModelArgument, ServeFlag
from kunserve.server.start.flags.serve_help import ServeCommand

logger = logging.getLogger("kunserve.server")

CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100}
EPILOG = "\n\n".join(
    (
        "Every flag is also a variable of the environment (--max-model-len: KUNSERVE_MAX_MODEL_LEN)"
        " and a key of the file that --config names. The command line goes before the environment, "
        "and the environment before the file.",
        "\b\n"
        "Examples:\n"
        "  kunserve serve smollm2-135m\n"
        "  kunserve serve ./Qwen2.5-0.5B --num-instances 2 --instance-memory 2GiB\n"
        "  kunserve serve smollm2-135m --load-format dummy --overload-policy recompute\n"
        "  kunserve serve --config serve.yaml --port 8001",
    )
)
SETTINGS_FILE = "kunserve.settings_file"
"""In the context's ``meta``: the config file and its keys, for the log."""


def _read_file(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    """``--config``, before every other flag: the file's values stand where defaults would."""
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = read_config_file(Path(value), ctx.command, ctx)
        flags = [one for one in ctx.command.params if isinstance(one, ServeFlag | ModelArgument)]
        ctx.meta[SETTINGS_FILE] = (value, [one.key for one in flags if one.name in ctx.default_map])


CONFIG_FLAG = ServeFlag(
    ["--config"],
    group="Settings",
    is_eager=True,
    expose_value=False,
    callback=_read_file,
    type=click.Path(),
    help="YAML file with flags as keys, as vLLM's.",
)
PARSERS = {
    "tool_call_parser": extra_names(TOOL_PARSERS),
    "reasoning_parser": sorted(REASONING_PARSERS),
}


@click.command(
    "serve",
    cls=ServeCommand,
    context_settings=CONTEXT,
    epilog=EPILOG,
    params=[
        ModelArgument(["model"], default=ModelConfig().model),
        CONFIG_FLAG,
        *declared_flags(PARSERS),
    ],
)
@click.pass_context
def serve_command(ctx: click.Context, /, **flags: Any) -> None:
    """Serve MODEL over several instances behind one OpenAI-compatible address.

    MODEL is smollm2-135m (built in), a Hugging Face folder or hub id, or a .gguf file.
    """
    gc.disable()  # until the server serves: a start makes many objects, and none of them garbage
    import uvloop

    from kunserve.cluster.log_format import start_logging
    from kunserve.server.start.launch import run_server

    try:
        config = config_from_flags(flags)
        start_logging(config.log)
        _log_origins(ctx)
        uvloop.run(run_server(config))
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    finally:
        gc.enable()


def _log_origins(ctx: click.Context) -> None:
    """Where settings came from, besides the command line: they are easily forgotten."""
    file = ctx.meta.get(SETTINGS_FILE)
    if file is not None:
        logger.info("settings file=%s keys=%s", file[0], ",".join(file[1]))
    variables = set_variables(ctx.command)
    if variables:
        logger.info("settings environment=%s", ",".join(variables))
    for line in unknown_variables(ctx.command):
        logger.warning("%s", line)


def _instance_config(flags: dict[str, Any]) -> InstanceConfig:
    """Flags that were not given take what suits the device."""
    given = {name: value for name, value in flags.items() if value is not None}
    if given.keys() >= {"gpu_memory_utilization", "memory_bytes"}:
        raise ConfigError("--gpu-memory-utilization and --instance-memory: give one of them")
    device = given.pop("device")
    if device == "auto":
        can = "cuda" in extra_names("cards")
        device = find_extra("cards", "cuda", "--device").auto_device() if can else "cpu"
    return InstanceConfig.of_device(device, **given)


def config_from_flags(flags: dict[str, Any]) -> KunServeConfig:
    """Each flag into the field of the same name, wherever in the tree that is."""
    left = dict(flags)
    tree = KunServeConfig()
    parts: dict[str, Any] = {}
    for part in fields(tree):
        branch = getattr(tree, part.name)
        mine = {f.name: left.pop(f.name) for f in fields(branch) if f.name in left}
        if isinstance(branch, InstanceConfig):
            parts[part.name] = _instance_config(mine)
        else:
            parts[part.name] = replace(branch, **mine)
    assert not left, f"flags that set nothing: {sorted(left)}"
    return KunServeConfig(**parts)
