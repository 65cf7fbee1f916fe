"""Notices of runs that an older simulator made, by name: gone when they are run again."""

from functools import partial

from benchmarks.paper.kept_results import figures_of
from benchmarks.paper.report.template import Text
from benchmarks.paper.simulated_code import codes

PREEMPTED = "preempted requests find what is left of their KV"
BATCHES = "pipelines form batches by other rules"
"""Changed before `PREEMPTED`, when a run kept its commit and no digest of the simulator."""
MARK = " (older simulator)"


def older_values() -> dict[str, Text]:
    """``older.FILE``: a sentence below its table. ``older.FILE.mark``: in the midst of one."""
    found: dict[str, Text] = {}
    for name in ("targets", "sensitivity"):
        found[f"older.{name}"] = partial(notice, name)
        found[f"older.{name}.mark"] = partial(_if_older, name, MARK)
    return found


def notice(benchmark: str) -> str:
    """What has changed since; nothing where the runs are of today's simulator."""
    has_digest = all("code" in line for line in figures_of(benchmark))
    changes = PREEMPTED if has_digest else f"{BATCHES}, and {PREEMPTED}"
    return _if_older(benchmark, f"These runs are of an older simulator: since then {changes}.")


def _if_older(benchmark: str, text: str) -> str:
    return text if benchmark in codes().older else ""
