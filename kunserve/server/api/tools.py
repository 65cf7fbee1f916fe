"""Tools in conversations: the template is told of them and of past calls."""

from typing import Any

from pydantic_core import from_json

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
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(
                f"`tools.{index}.function.parameters` must be a JSON schema: an object.", "tools"
            )
    return tools


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
            # As the body itself is read: what is no text there is none here.
            arguments = from_json(arguments) if arguments else {}
        except ValueError as error:
            raise InvalidRequest(
                f"`{where}.function.arguments` is not valid JSON: {error}", "messages"
            ) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}.function.arguments` must be an object.", "messages")
    return {**call, "function": {**function, "arguments": arguments or {}}}
