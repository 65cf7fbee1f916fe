"""How ``kunserve serve`` reads its command line and shows its help."""

from collections.abc import Mapping
from typing import ClassVar

import click

from kunserve.server.start.flags import overload
from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve.server.start.foreign_flags import refuse_foreign


class ServeCommand(GroupedCommand):
    """Says why a flag that other servers have is not there."""

    group_texts: ClassVar[Mapping[str, str]] = {overload.GROUP: overload.TEXT}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        refuse_foreign(args)
        return super().parse_args(ctx, args)
