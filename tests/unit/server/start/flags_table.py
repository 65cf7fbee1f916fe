"""The flags as Markdown, for ``docs/configuration.md``.

``python -m tests.unit.server.start.flags_table docs/configuration.md`` renews the page.
"""

import sys
from pathlib import Path

import click

from kunserve.server.start.command import serve_command
from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve.server.start.flags.option import (
    ByteSize,
    FiniteRange,
    JsonObject,
    JsonSettings,
    ServeFlag,
    TextList,
)

BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def flags_tables(command: click.Command) -> str:
    """A table for each group."""
    groups: dict[str, list[ServeFlag]] = {}
    for parameter in command.params:
        if isinstance(parameter, ServeFlag):
            groups.setdefault(parameter.group, []).append(parameter)
    texts = command.group_texts if isinstance(command, GroupedCommand) else {}
    parts = []
    for name, flags in groups.items():
        intro = f"{texts[name]}\n\n" if name in texts else ""
        rows = "\n".join(map(_row, flags))
        head = "| flag | takes | default | meaning |\n|---|---|---|---|"
        parts.append(f"### {name}\n\n{intro}{head}\n{rows}\n")
    return "\n".join(parts)


def renewed(page: str, command: click.Command) -> str:
    """The page with the tables of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, "the page has no place for the tables"
    return f"{before}{BEGIN}\n\n{flags_tables(command)}\n{END}{after}"


def _row(flag: ServeFlag) -> str:
    names = " ".join(f"`{name}`" for name in (*flag.opts, *flag.secondary_opts))
    cells = (names, _takes(flag), _default(flag), flag.help or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(flag: ServeFlag) -> str:
    """What the flag takes, in a word or two. A range with a point has fractions too."""
    if flag.is_flag:
        return "switch"
    match flag.type:
        case click.Choice():
            return ", ".join(map(str, flag.type.choices))
        case click.IntRange():
            return _range(flag.type, "d", "integer")
        case FiniteRange():
            return _range(flag.type, ".1f", "number")
        case ByteSize():
            return "size"
        case JsonObject() | JsonSettings():
            return "JSON"
        case click.types.IntParamType():
            return "integer"
    return "texts" if flag.multiple or isinstance(flag.type, TextList) else "text"


def _range(kind: click.IntRange | FiniteRange, form: str, noun: str) -> str:
    if kind.min is None:
        return noun
    above = ">" if kind.min_open else "≥"
    return f"{kind.min:{form}}-{kind.max:{form}}" if kind.max else f"{above}{kind.min:{form}}"


def _default(flag: ServeFlag) -> str:
    value = flag.default
    if flag.is_flag:
        return "on" if value is True else "off"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    is_set = isinstance(value, str | int | float) and value != ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if is_set else ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(), serve_command))
