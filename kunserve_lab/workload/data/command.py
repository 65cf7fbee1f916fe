"""``kunserve data``: what there is by name, and the download of what is not shipped."""

import click

from kunserve.core.errors import KunServeError
from kunserve_lab.workload.data.catalog import DATA_SETS, DataSet, cache_folder, file_of
from kunserve_lab.workload.data.download import fetch


@click.command("data", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[NAME]...")
def data_command(names: tuple[str, ...]) -> None:
    """List the data sets, or make sure that those named are on this machine.

    A name can stand wherever a trace or a file of lengths is asked for. Downloads are checked and
    kept in ~/.cache/kunserve/data.
    """
    if not names:
        for line in listing():
            click.echo(line)
        return
    for name in names:
        data = DATA_SETS.get(name)
        if data is None:
            raise click.ClickException(f"no data set {name!r}; there are: {', '.join(DATA_SETS)}")
        try:
            path = file_of(data) if data.download is None else fetch(data)
        except KunServeError as error:
            raise click.ClickException(str(error)) from None
        click.echo(f"{name}: {'generated, needs no file' if path is None else path}")


def listing() -> list[str]:
    """The catalogue as lines of text."""
    head = ("name", "kind", "size", "licence", "here", "what")
    rows = [head, *(_row(data) for data in DATA_SETS.values())]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*lines, "", f"Downloads go to {cache_folder()}; `kunserve data NAME` fetches one."]


def _row(data: DataSet) -> tuple[str, ...]:
    path = file_of(data)
    if path is None:
        size, here = "-", "generated"
    elif data.download is None:
        size, here = f"{path.stat().st_size / 1e6:.2f} MB", "shipped"
    else:
        size, here = data.download.size, "yes" if path.exists() else "no"
    return (data.name, data.kind, size, data.licence, here, data.summary)
