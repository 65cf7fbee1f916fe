"""Calls that the client demanded: the output is their JSON and nothing else."""

from kunserve.server.api.parsers.json_calls import json_calls
from kunserve.server.api.parsers.message import MessageWriter
from kunserve.server.api.parsers.tape import Reading, Tape
from kunserve.server.api.parsers.tool_parser import ToolParser, Tools


def _read_list(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
    yield from json_calls(tape, out)
    yield from tape.rest(out.content)


REQUIRED = ToolParser(_read_list)
"""A list of ``{"name": ..., "parameters": {...}}``."""


def named(name: str) -> ToolParser:
    """The output is the arguments of this tool."""

    def read(tape: Tape, out: MessageWriter, tools: Tools) -> Reading[None]:
        yield from tape.spaces()
        out.begin_call(name)
        yield from tape.rest(out.arguments)

    return ToolParser(read)
