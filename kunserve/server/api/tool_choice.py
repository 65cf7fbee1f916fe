"""``tool_choice``: whether an answer may, must or must not call tools, and which."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kunserve.core.errors import InvalidRequest
from kunserve.core.request import StructuredOutput
from kunserve.server.api.forms.body import MAX_FORM_CHARS, is_too_long, too_long
from kunserve.server.api.schema import shown_value

Tool: TypeAlias = dict[str, Any]
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the client chose, once checked."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """Of the tool that a named choice names."""


def read_tool_choice(tools: Sequence[Tool], choice: Any, allows_auto: bool) -> ToolChoice:
    """The choice that a request makes. Not choosing means ``auto`` where there are tools.

    ``allows_auto``: whether the server was told how the model writes calls. Raises InvalidRequest.
    """
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolChoice("none")
        raise InvalidRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice in (None, "auto"):
        if not allows_auto:
            raise InvalidRequest(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
                'be set. Without them, `tool_choice` may be "none", "required" or a function.',
                "tools" if choice is None else "tool_choice",
            )
        return ToolChoice("auto")
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    return ToolChoice("named", _named(tools, choice))


def _named(tools: Sequence[Tool], choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise InvalidRequest(
            '`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": ...}}}} (got {shown_value(choice)}).',
            "tool_choice",
        )
    if name not in (tool["function"]["name"] for tool in tools):
        raise InvalidRequest(
            f"`tool_choice` names {name[:80]!r}, which is not among `tools`.", "tool_choice"
        )
    return name


def demanded_output(
    tools: Sequence[Tool], choice: ToolChoice, max_calls: int | None
) -> StructuredOutput | None:
    """The form that the output must have so that it is the calls that were demanded.

    Raises InvalidRequest where it would be longer than a form may be.
    """
    if choice.mode == "named":
        parameters = next(
            tool["function"].get("parameters")
            for tool in tools
            if tool["function"]["name"] == choice.name
        )
        return _form(parameters or NO_PARAMETERS)
    if choice.mode != "required":
        return None
    if is_too_long([tool["function"].get("parameters") for tool in tools]):
        raise too_long("tools", "tools")
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool["function"], definitions) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return _form(schema)


def _form(schema: dict[str, Any]) -> StructuredOutput:
    text = "" if is_too_long(schema) else json.dumps(schema)
    if not text or len(text) > MAX_FORM_CHARS:
        raise too_long("tools", "tools")
    return StructuredOutput("json_schema", text)


def _call_schema(function: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One call. Parameters that refer to parts of themselves go into ``definitions``."""
    name, parameters = function["name"], function.get("parameters") or NO_PARAMETERS
    place = f"#/$defs/{len(definitions)}"
    moved = _moved(parameters, place)
    if moved != parameters:
        definitions[str(len(definitions))] = moved
        moved = {"$ref": place}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": moved},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to its own root at another place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
