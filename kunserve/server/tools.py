"""Tools in conversations: the template is told of them and of past calls.

The server does not read calls out of an answer, so it refuses to promise them.
"""

import json
from typing import Any

from kunserve.core.errors import InvalidRequest


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools for the template; None for none. Raises InvalidRequest for what is no tool."""
    if not tools:
        return None
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequest(f"`tools.{index}` must be of type `function`.", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"`tools.{index}.function.name` must be a string.", "tools")
    return tools


def check_tool_choice(tools: list[dict[str, Any]] | None, choice: Any) -> None:
    """Raise InvalidRequest unless the client expects no call; not choosing means ``auto``."""
    if choice == "none" or (not tools and choice in (None, "auto")):
        return
    if not tools:
        raise InvalidRequest("`tool_choice` needs `tools`.", "tool_choice")
    raise InvalidRequest(
        'This server does not call tools yet. With `tool_choice` "none" the model is told of '
        "the `tools`, and answers in text.",
        "tools" if choice is None else "tool_choice",
    )


def called_tools(where: str, calls: Any) -> list[dict[str, Any]]:
    """Past calls for the template, which wants arguments as objects, not as JSON."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"`{where}.tool_calls` must be a list.", "messages")
    return [_called(f"{where}.tool_calls.{index}", call) for index, call in enumerate(calls)]


def _called(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"`{where}.function.name` must be a string.", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"`{where}.function.arguments` is not valid JSON: {error}", "messages"
            ) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}.function.arguments` must be an object.", "messages")
    return {**call, "function": {**function, "arguments": arguments or {}}}
