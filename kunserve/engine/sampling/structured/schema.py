"""A JSON Schema as the library takes it: closed objects, and no formats that it does not know."""

from collections.abc import Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
_VALUES = ("const", "default", "enum", "examples", "required")
"""Keywords whose values are no schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_OF_ONE_VALUE = ("allOf", "anyOf", "oneOf")
_JOINABLE = frozenset((*_OF_ONE_VALUE, "$ref", "properties", "patternProperties"))
_OPEN = ("additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties")
"""Keywords that say, or count on, what else an object may have."""


def prepare_schema(schema: Any) -> None:
    """Change a schema in place.

    An object has the properties that its schema names and no others, unless the schema says
    ``additionalProperties``: so do vLLM's answers, and else a small model goes on for ever. What
    several schemas say of one object stays as it is written, because each would forbid the others'.
    Formats are notes in JSON Schema, so one that the library would refuse goes.
    """
    places = list(_places(schema, False))
    for node, _ in places:
        if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
            del node["format"]
    if any("$ref" in node and (is_joined or _joins(node)) for node, is_joined in places):
        return
    for node, is_joined in places:
        if not is_joined and not _joins(node) and _is_left_open(node):
            node["additionalProperties"] = False


def _places(node: Any, is_joined: bool) -> Iterator[tuple[Schema, bool]]:
    """Each schema within one, and whether others say something of the same value."""
    if not isinstance(node, dict):
        return
    yield node, is_joined
    for key, inner in node.items():
        joined = key in _OF_ONE_VALUE and (is_joined or _joins(node))
        if key in _BY_NAME and isinstance(inner, dict):
            inner = list(inner.values())
        for one in inner if isinstance(inner, list) else [inner]:
            if key not in _VALUES:
                yield from _places(one, joined)


def _joins(node: Schema) -> bool:
    return len(_JOINABLE & node.keys()) > 1 + (
        {"properties", "patternProperties"} <= node.keys()
    ) or (isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1)


def _is_left_open(node: Schema) -> bool:
    """Whether an object's schema names properties, and may be closed behind them."""
    if not {"properties", "patternProperties"} & node.keys() or any(key in node for key in _OPEN):
        return False
    named, wanted = node.get("properties", {}), node.get("required", [])
    return all(name in named for name in wanted)
