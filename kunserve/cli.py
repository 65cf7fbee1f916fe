"""The ``kunserve`` command."""

import difflib
import importlib
import importlib.metadata
from typing import Any, TypeAlias

import click
import click.shell_completion

import kunserve
from kunserve.core.code import code_of

CommandRow: TypeAlias = tuple[str, str, str]
_OWN: dict[str, CommandRow] = {
    "serve": (
        "kunserve.server.start.command",
        "serve_command",
        "Serve a model over several instances.",
    ),
}
"""Name -> module, object, one line. Imported only when used, so that --help stays fast."""


def _commands() -> dict[str, CommandRow]:
    """The server's own commands, and those of installed packages that bring some: each names a
    dict of such rows under the entry point group ``kunserve.commands``.
    """
    found = dict(_OWN)
    for entry in sorted(importlib.metadata.entry_points(group="kunserve.commands")):
        found |= entry.load()
    return found


_COMMANDS = _commands()
_EXTRAS = {
    **dict.fromkeys(("aiohttp", "matplotlib", "rich", "scipy"), "bench"),
    "opentelemetry": "otel",
}
"""Package -> the extra that brings it, because a server does not need it."""


def _named(error: ModuleNotFoundError, command: str | None) -> Exception:
    """The lack of a package that an extra brings as one line that says how to get it."""
    missing = (error.name or "").partition(".")[0]
    if missing not in _EXTRAS:
        return error
    return click.ClickException(
        f"kunserve {command} needs the package {missing}: "
        f"pip install 'kunserve[{_EXTRAS[missing]}]'"
    )


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        try:
            command: Any = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise _named(error, cmd_name) from None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See ``click.Group``. A slip of the pen is told what it may have meant."""
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; some import what they need only then."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise _named(error, ctx.invoked_subcommand) from None

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Names of commands, without importing them: this runs at every Tab."""
        names = [
            click.shell_completion.CompletionItem(name, help=text)
            for name, (_, _, text) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


def _tell_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"kunserve {kunserve.__version__} (code {code_of()})")
        ctx.exit()


@click.command(cls=_LazyGroup)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Serve one large language model from several instances.

    In a burst, KunServe turns replicated layers into KV cache instead of letting requests queue.
    """


if __name__ == "__main__":
    main()
