"""Click options in groups, and options that take several values as vLLM's do."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click


class GroupedOption(click.Option):
    """An option that ``--help`` lists under ``group``."""

    def __init__(self, *args: Any, group: str = "Other", many: bool = False, **attrs: Any) -> None:
        if many:
            attrs["multiple"] = True
        super().__init__(*args, **attrs)
        self.group = group
        self.many = many


class GroupedCommand(click.Command):
    """A command whose help is in groups; a ``many`` option takes values up to the next flag.

    So ``--goodput ttft:500 tpot:50`` works as it does in vLLM. If the command has an argument,
    that must stand first: otherwise the last of several values could be meant to be it.
    """

    group_texts: ClassVar[Mapping[str, str]] = {}
    """What ``--help`` says above the options of a group."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats the flag of a ``many`` option before each of its values."""
        many = {
            name
            for parameter in self.params
            if isinstance(parameter, GroupedOption) and parameter.many
            for name in parameter.opts
        }
        has_argument = any(isinstance(parameter, click.Argument) for parameter in self.params)
        if not has_argument or (args and not args[0].startswith("-")):
            args = _repeated(args, many)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section per group, in the order in which groups first appear."""
        groups: dict[str, list[tuple[str, str]]] = {}
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for parameter in sorted(options, key=lambda one: not isinstance(one, GroupedOption)):
            line = parameter.get_help_record(ctx)
            if line is not None:
                name = parameter.group if isinstance(parameter, GroupedOption) else "Other"
                groups.setdefault(name, []).append(line)
        for name, lines in groups.items():
            with formatter.section(name):
                text = self.group_texts.get(name)
                if text is not None:
                    formatter.write_text(text)
                    formatter.write_paragraph()
                formatter.write_dl(lines, col_max=34)


def _repeated(args: Sequence[str], many: set[str]) -> list[str]:
    """``--flag a b`` to ``--flag a --flag b`` for the flags in ``many``."""
    result: list[str] = []
    flag: str | None = None
    num_values = 0
    for arg in args:
        if arg in many:
            flag, num_values = arg, 0
        elif arg.startswith("--"):
            flag = None
        elif flag is not None:
            num_values += 1
            if num_values > 1:
                result.append(flag)
        result.append(arg)
    return result
