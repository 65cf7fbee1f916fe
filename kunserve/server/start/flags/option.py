"""A flag of ``kunserve serve``: also a variable of the environment and a key of the config file."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from kunserve.core.config import MIB
from kunserve.core.errors import ConfigError
from kunserve.server.start.flags.grouped import GroupedOption

PREFIX = "KUNSERVE_"
_KUBERNETES = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes writes into ``X_PORT`` of every pod beside a service that is named ``x``."""
_POWERS = ("", "k", "m", "g", "t")


class ByteSize(click.ParamType[int]):
    """A number of bytes with an optional unit: ``800MiB``, ``1.5g`` (GiB), ``600MB`` (decimal)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes, or a usage error that says what is accepted."""
        match = re.fullmatch(r"\s*([\d.]{1,20})\s*([kmgt]?)(i?b)?\s*", str(value).lower())
        if match is None or match[1].count(".") > 1 or match[1] == ".":
            self.fail(f"{value!r} is no size; write for example 800MiB or 1.5GiB", param, ctx)
        base = 1000 if match[3] == "b" else 1024
        size_bytes = int(float(match[1]) * base ** _POWERS.index(match[2]))
        if match[2] == "" and match[3] is None and size_bytes < MIB:
            self.fail(f"{value} bytes are too few; write {value}MiB if you mean that", param, ctx)
        return size_bytes


class HintedChoice(click.Choice[str]):
    """A choice that knows what users of other servers try, and what to tell them."""

    def __init__(self, choices: list[str], hints: Mapping[str, str]) -> None:
        super().__init__(choices)
        self._hints = hints

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The choice, or a usage error."""
        hint = self._hints.get(str(value))
        if hint is not None:
            self.fail(f"{value!r}: {hint}", param, ctx)
        return str(super().convert(value, param, ctx))


class TextList(click.ParamType[tuple[str, ...]]):
    """Texts with commas between them, or as a list of JSON, as vLLM wants them."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The texts, or a usage error."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except ValueError:
                self.fail(f"{value!r} is no list of JSON", param, ctx)
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(one, str) for one in items):
            self.fail(f"{value!r} is no list of texts", param, ctx)
        return tuple(one.strip() for one in items if one.strip())


class JsonObject(click.ParamType[str]):
    """An object in JSON. It stays the text that it is."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, or a usage error. A config file may hold the object itself."""
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, TypeError):  # YAML knows values that JSON has no word for
            is_object = False
        if not is_object:
            self.fail(f"{value!r} is no object of JSON", param, ctx)
        return text


class JsonSettings(click.ParamType[Any]):
    """An object in JSON with the fields of a part of the configuration."""

    name = "json"

    def __init__(self, kind: type[Any]) -> None:
        """``kind`` is a dataclass, whose fields have defaults."""
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The part, or a usage error that says which field is wrong."""
        if isinstance(value, self._kind):
            return value
        given = json.loads(JsonObject().convert(value, param, ctx))
        known = [field.name for field in fields(self._kind)]
        try:
            found = msgspec.convert(given, self._kind)
        except (msgspec.ValidationError, ConfigError) as error:
            self.fail(str(error), param, ctx)
        for key in given:
            if key not in known:
                self.fail(f"{key!r} is none of its keys, which are {', '.join(known)}", param, ctx)
        return found


class FiniteRange(click.FloatRange):
    """A number within bounds. ``nan`` is within none, though no comparison says so."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, or a usage error."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def expected(parameter: click.Parameter) -> str:
    """What a parameter takes, in words."""
    if getattr(parameter, "is_flag", False):
        return "true or false"
    one = _expected_one(parameter.type)
    return "one or several texts" if getattr(parameter, "multiple", False) else one


def _expected_one(kind: click.ParamType[Any]) -> str:
    match kind:
        case click.Choice():
            return "one of " + ", ".join(map(str, kind.choices))
        case click.IntRange() | FiniteRange():
            noun = "an integer" if isinstance(kind, click.IntRange) else "a number"
            low, high = kind.min, kind.max
            if low is not None and high is not None:
                return f"{noun} from {low:g} to {high:g}"
            if low is not None:
                return f"{noun} {'above' if kind.min_open else 'from'} {low:g}"
            return noun
        case TextList():
            return "a list of texts"
        case JsonObject() | JsonSettings():
            return "an object of JSON"
        case ByteSize():
            return "a size such as 800MiB"
        case _ if kind is click.INT:
            return "an integer"
        case _:
            return "a text"


def variable_value(name: str) -> str | None:
    """A variable's value; None if it has none, or one that Kubernetes gave it."""
    value = os.environ.get(name)
    return None if not value or _KUBERNETES.match(value) else value


class ServeFlag(GroupedOption):
    """See the module. A ``secret`` one must not be empty, wherever it comes from."""

    def __init__(self, *args: Any, secret: bool = False, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.secret = secret

    @property
    def key(self) -> str:
        """The flag without its dashes: its key in the config file."""
        return max(self.opts, key=len).lstrip("-")

    @property
    def variable(self) -> str:
        """Its variable in the environment."""
        return PREFIX + self.key.replace("-", "_").upper()

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """See ``click.Option``. An empty variable counts as none, as it does elsewhere."""
        if self.secret and os.environ.get(self.variable) == "":
            raise click.UsageError(
                f"The variable {self.variable} is empty. Give it a value, or remove it.", ctx
            )
        return variable_value(self.variable)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """See ``click.Parameter``. A wrong value is told by the name that its user wrote."""
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            source = ctx.get_parameter_source(self.name or "")
            if source is not ParameterSource.ENVIRONMENT:
                raise
            raise click.UsageError(
                f"The variable {self.variable} must be {expected(self)}: {error.message}", ctx
            ) from None


class ModelArgument(click.Argument):
    """The model: also ``KUNSERVE_MODEL``, and ``model`` in the config file."""

    key = "model"
    variable = PREFIX + "MODEL"

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, envvar=self.variable, **attrs)
