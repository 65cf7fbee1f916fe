"""How ``kunserve serve`` reads its command line and shows its help."""

from collections.abc import Mapping
from typing import ClassVar

import click

from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve.server.start.foreign_flags import refuse_foreign

_OVERLOAD = (
    "Each group of instances is watched at every report. It is overloaded when its KV memory holds "
    "requests up. Then two groups merge into a pipeline: each instance keeps a part of the "
    "layers, and the other layers become KV memory. It is relaxed when its demand has been low for "
    "a while. Then the layers come back from the other instances."
)


class ServeCommand(GroupedCommand):
    """Says why a flag that other servers have is not there."""

    group_texts: ClassVar[Mapping[str, str]] = {"Overload": _OVERLOAD}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        refuse_foreign(args)
        return super().parse_args(ctx, args)
