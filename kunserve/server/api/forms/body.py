"""The form that a request body asks for: OpenAI's field, or vLLM's."""

import json
from typing import Any, NamedTuple

from kunserve.core.errors import InvalidRequest
from kunserve.core.request import StructuredOutput, StructureKind
from kunserve.server.api.schema import GenerationBody, shown_value

MAX_FORM_CHARS = 256 << 10
"""Of a schema, an expression, all choices together, or a grammar."""
_KINDS: dict[str, StructureKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
"""Of JSON: what may lie between its parts."""
_REFUSED = ("structural_tag", "disable_additional_properties")


class AskedForm(NamedTuple):
    """What a body asks for."""

    param: str
    """The field that does."""
    form: StructuredOutput


def form_of(body: GenerationBody) -> AskedForm | None:
    """What the output must be; None for any text. Raises InvalidRequest."""
    asked = (
        ("response_format", _response_format(body.response_format)),
        ("structured_outputs", _structured_outputs(body.structured_outputs)),
    )
    found = [AskedForm(name, form) for name, form in asked if form is not None]
    if len(found) > 1:
        names = " and ".join(f"`{one.param}`" for one in found)
        raise InvalidRequest(f"Only one of {names} may be given.", found[1].param)
    return found[0] if found else None


def _response_format(value: Any) -> StructuredOutput | None:
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong(name, name, "an object with a `type`", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput("json_object", "")
        case "json_schema":
            wrapped = value.get("json_schema")
            if not isinstance(wrapped, dict):
                raise _wrong(name, f"{name}.json_schema", "an object with a `schema`", wrapped)
            # ``strict`` changes nothing: a schema always holds.
            where = f"{name}.json_schema.schema"
            return _form(name, where, "json_schema", wrapped.get("schema"))
    raise InvalidRequest(
        f"`{name}.type` must be `text`, `json_object` or `json_schema` "
        f"(got {shown_value(value.get('type'))}).",
        name,
    )


def _structured_outputs(value: Any) -> StructuredOutput | None:
    name = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong(name, name, "an object", value)
    for key, given in value.items():
        if key in _REFUSED and given:
            raise InvalidRequest(f"`{name}.{key}` is not supported by this server.", name)
        if key not in (*_KINDS, *_OPTIONS, *_REFUSED):
            raise InvalidRequest(f"`{name}.{key[:40]}` is not a known field.", name)
    given = {key: value[key] for key in _KINDS if value.get(key) not in (None, False)}
    if len(given) != 1:
        choices = ", ".join(f"`{key}`" for key in _KINDS)
        raise InvalidRequest(f"`{name}` needs exactly one of {choices}.", name)
    ((key, what),) = given.items()
    options = _options(name, value)
    if key == "json_object":
        if what is not True:
            raise _wrong(name, f"{name}.{key}", "true or false", what)
        if not options:
            return StructuredOutput("json_object", "")
        what = {"type": "object"}
    form = _form(
        name, f"{name}.{key}", _KINDS[key] if key != "json_object" else "json_schema", what
    )
    if not options:
        return form
    if form.kind != "json_schema":
        raise InvalidRequest(f"`{name}`: options of white space need `json`.", name)
    return _with_options(form, options)


def _options(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """In the library's words, which a schema may carry."""
    options: dict[str, Any] = {}
    pattern = value.get("whitespace_pattern")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise _wrong(name, f"{name}.whitespace_pattern", "a string", pattern)
        if is_too_long(pattern):
            raise too_long(name, f"{name}.whitespace_pattern")
        options["whitespace_pattern"] = pattern
    if value.get("disable_any_whitespace"):
        # Both, because the front's own pattern is the default.
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    return options


def _with_options(form: StructuredOutput, options: dict[str, Any]) -> StructuredOutput:
    schema = json.loads(form.text)
    known = schema.get("x-guidance")
    schema["x-guidance"] = {**(known if isinstance(known, dict) else {}), **options}
    return StructuredOutput("json_schema", json.dumps(schema))


def _form(name: str, where: str, kind: StructureKind, value: Any) -> StructuredOutput:
    if is_too_long(value):
        raise too_long(name, where)
    match kind:
        case "json_schema":
            text = _schema_text(name, where, value)
        case "choice":
            if (
                not isinstance(value, list)
                or not value
                or not all(isinstance(one, str) for one in value)
            ):
                raise _wrong(name, where, "a list of strings", value)
            text = json.dumps(value)
        case _:
            if not isinstance(value, str) or not value:
                raise _wrong(name, where, "a string", value)
            text = value
    if len(text) > MAX_FORM_CHARS:
        raise too_long(name, where)
    return StructuredOutput(kind, text)


def is_too_long(value: Any) -> bool:
    """Whether JSON of the value is surely too long for a form.

    Looks at no more of it than a form may have, because writing it takes seconds.
    """
    left, stack = MAX_FORM_CHARS, [value]
    while stack and left >= 0:
        one = stack.pop()
        left -= 1
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, list | dict):
            left -= len(one)
            if left >= 0:
                stack.extend(one if isinstance(one, list) else (*one, *one.values()))
    return left < 0


def too_long(name: str, where: str) -> InvalidRequest:
    """What is said of it."""
    return InvalidRequest(f"`{where}` may have {MAX_FORM_CHARS} characters at most.", name)


def _schema_text(name: str, where: str, value: Any) -> str:
    """In one spelling, with the properties in the client's order."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"`{where}` is not a JSON schema: {error}", name) from None
    if not isinstance(schema, dict):
        raise _wrong(name, where, "a JSON schema, which is an object", value)
    return text


def _wrong(name: str, where: str, expected: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"`{where}` must be {expected} (got {shown_value(value)}).", name)
