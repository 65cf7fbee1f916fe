"""Keywords of ``LLM``: the flags of ``kunserve serve``, checked as the keys of a config file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import click

from kunserve.core.config import KunServeConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.start.flags.config_file import checked_settings
from kunserve.server.start.flags.option import ModelArgument, ServeFlag, TextList

_WHERE = "LLM"
_OF_A_SERVER = {field.name for field in fields(ServerConfig)} - {"request_timeout_s"} | {
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "front_grace_s",
    "otlp_traces_endpoint",
    "reasoning_parser",
    "tool_call_parser",
    "uvicorn_access_log",
    "uvicorn_log_level",
}
"""What says how a server is reached, how it writes answers, or what it leaves behind."""


def config_from_keywords(given: Mapping[str, Any]) -> KunServeConfig:
    """The configuration, where a keyword is a flag without dashes, and ``model`` the model.

    Keywords go before ``KUNSERVE_*`` variables. Instances log warnings only, unless told. Raises
    ConfigError for whatever ``kunserve serve`` would refuse, and for flags of its HTTP side.
    """
    try:
        with click.Context(serve_command) as ctx:
            settings = {"log_level": "warning", **given}
            values = checked_settings(_WHERE, settings, serve_command, ctx)
        _refuse(values)
        args = [*_arguments(values)]
        params = serve_command.make_context(_WHERE, args).params
        # What is off by default has no flag that says so, and a variable or a file may have it on.
        params |= {name: False for name, value in values.items() if value is False}
        config = config_from_flags(params)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
    # Variables and files of a server on this machine may say more of it, such as queue limits.
    server = ServerConfig(request_timeout_s=config.server.request_timeout_s)
    return replace(config, server=server)


def _refuse(values: Mapping[str, Any]) -> None:
    for parameter in serve_command.params:
        if isinstance(parameter, ServeFlag) and parameter.name in _OF_A_SERVER & values.keys():
            raise ConfigError(
                f"{_WHERE}: `{parameter.key.replace('-', '_')}` is about a server, and an LLM is "
                "none; see `kunserve serve`"
            )


def _arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """The values as a command line, because that goes before the environment."""
    for parameter in serve_command.params:
        value = values.get(parameter.name or "")
        if value is None:
            continue
        if isinstance(parameter, ModelArgument):
            yield str(value)
            continue
        flag = max(parameter.opts, key=len)
        if isinstance(value, bool):
            names = [flag] if value else parameter.secondary_opts
            yield from names
        elif isinstance(parameter.type, TextList) and not isinstance(value, str):
            yield f"{flag}={json.dumps(list(value))}"
        else:
            many = value if isinstance(value, list | tuple) else [value]
            yield from (f"{flag}={one}" for one in many)
