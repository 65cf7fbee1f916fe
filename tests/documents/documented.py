"""The commands that README, docs and ``--help`` show, as a reader would type them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from kunserve.cli import main

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/wishes.md", "docs/deploy.md", "docs/offline.md", "docs/vllm-fleets.md")
_PROGRAM = r"(?:\.venv/bin/)?kunserve|curl|make|pip|docker|kubectl|helm|python|eval|ray start"
_COMMAND = re.compile(rf"(?:{_PROGRAM}) ")
_SPAN = re.compile(rf"`((?:{_PROGRAM}) [^`]+)`")


def documented_commands() -> dict[str, str]:
    """Command -> where it is shown."""
    found = {}
    for page in PAGES:
        for command in _of_page((ROOT / page).read_text()):
            found.setdefault(command, page)
    with click.Context(main) as context:
        for name in main.list_commands(context):
            shown = main.get_command(context, name)
            assert shown is not None
            for command in _of_help(shown.epilog or ""):
                found.setdefault(command, f"kunserve {name} --help")
    return found


def _of_page(text: str) -> Iterator[str]:
    blocks = text.split("```")
    for block in blocks[1::2]:
        if block.startswith("\n"):  # no language that is not a shell's
            yield from _joined(block.splitlines())
    for outside in blocks[::2]:
        yield from _SPAN.findall(outside)


def _of_help(epilog: str) -> Iterator[str]:
    lines = [line.strip() for line in epilog.splitlines()]
    shown = [i for i, line in enumerate(lines) if _COMMAND.match(line)]
    for begin in shown:
        end = begin
        while lines[end].endswith("\\"):
            end += 1
        yield from _joined(lines[begin : end + 1])


def _joined(lines: list[str]) -> Iterator[str]:
    """Whole commands: a line that ends within quotes, or with a backslash, goes on."""
    part = ""
    for line in lines:
        part = f"{part}{line}"
        if part.endswith("\\"):
            part = part[:-1].rstrip() + " "
            continue
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            part += "\n"
            continue
        if words:
            yield re.sub(r"\s+#.*$", "", part).strip()
        part = ""
    assert not part, f"a command that does not end: {part}"
