"""``kunserve compare``: an experiment file, in the real or in the simulated world."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from kunserve.core.errors import KunServeError
from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve_lab.bench.flag_groups import option
from kunserve_lab.compare.flag_values import names, numbers, whole_numbers

_what = option("What is run")
_output = option("Output")


# fmt: off
@click.command(
    "compare",
    cls=GroupedCommand,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@click.argument("path", metavar="FILE.toml", type=click.Path(dir_okay=False, path_type=Path))
@_what("--systems", metavar="NAME[,NAME...]", help="Instead of the file's.")
@_what("--loads", metavar="F[,F...]", help="Instead of the file's.")
@_what("--seeds", metavar="N[,N...]", help="Instead of the file's.")
@_what("--rounds", type=click.IntRange(min=1), help="Instead of the file's. Real world only.")
@_output("-o", "--output", type=click.Path(file_okay=False, path_type=Path),
         help="Folder for results.jsonl, table.txt, figures and report.html. "
         "Default: results/ and the file's name.")
@_output("--fresh", is_flag=True,
         help="Run again what the folder has already. If interrupted, go on without it.")
@_output("--save-requests", is_flag=True,
         help="Keep every request of simulated runs too, a JSONL per run.")
@_output("--chrome-trace", is_flag=True, help="Also every step, for Perfetto.")
@_output("--jobs", type=click.IntRange(min=1),
         help="Simulations at once, each in a process of its own. Default: one per core.")
def compare_command(path: Path, **flags: Any) -> None:
    """Run the comparison that FILE.toml describes; its world is real or simulated.

    A run that the output folder has already is not run again, so an interrupted comparison goes
    on where it stopped. Real systems run one after the other, in alternating order.

    Real comparisons may have servers that are not ours, vLLM for one: a table [others.NAME] in
    the file has the command that starts them, or the urls of those that run already.
    """
    from kunserve_lab.compare.comparison import Options, compare
    from kunserve_lab.compare.experiment_file import read_experiment

    options = Options(
        save_requests=flags["save_requests"],
        chrome_trace=flags["chrome_trace"],
        num_jobs=flags["jobs"],
        is_fresh=flags["fresh"],
    )
    try:
        experiment = dataclasses.replace(read_experiment(path), **_asked(flags))
        compare(experiment, flags["output"] or Path("results") / path.stem, options)
    except KunServeError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None


def _asked(flags: dict[str, Any]) -> dict[str, Any]:
    """What replaces the file's values."""
    values: dict[str, Any] = {}
    if flags["systems"] is not None:
        values["systems"] = names(flags["systems"])
    if flags["loads"] is not None:
        values["loads"] = numbers("--loads", flags["loads"])
    if flags["seeds"] is not None:
        values["seeds"] = whole_numbers("--seeds", flags["seeds"])
    if flags["rounds"] is not None:
        values["rounds"] = flags["rounds"]
    return values
