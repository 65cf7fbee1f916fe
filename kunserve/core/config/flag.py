"""How a field of the configuration is set from outside: said once, where the field stands.

From its annotation and its docstring come the flag of ``kunserve serve``, its variable of the
environment, its key of the config file, its keyword of ``LLM`` and its row in
``docs/configuration.md``: see ``server/start/flags``. What the flag takes follows from the field's
type, and its name from the field's, unless told. The docstring's first paragraph is the flag's
help, word for word.
"""

from dataclasses import KW_ONLY, dataclass

GROUPS = (
    "Model", "Chat", "Instances", "Batches", "Overload", "Address", "TLS", "Access", "Limits",
    "Answers", "Logs and traces", "Faults and traces",
)  # fmt: skip
"""The headings of ``--help``, in this order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """See the module."""

    group: str
    name: str | None = None
    """Its spellings with spaces between, where it is not the field's; a switch's ``--on/--off``."""
    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    above: float | None = None
    """As ``least``, but this number itself is too small."""
    choices: tuple[str, ...] = ()
    """Which texts it takes, where the field's type does not say so."""
    ignores_case: bool = False
    """Of the choices."""
    is_json: bool = False
    """A text that is an object of JSON."""
    is_many: bool = False
    """Takes values up to the next flag, instead of a list with commas."""
    is_secret: bool = False
    """Must not be empty, wherever it comes from."""
    can_negate: bool = False
    """A switch that is off by default, and has its ``--no-...`` nonetheless."""
    suits_device: bool = False
    """Without the flag the device decides, and the field's default is that of CPUs."""
    before: str | None = None
    """The field before which it is listed, instead of where its own stands."""
