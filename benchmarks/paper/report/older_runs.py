"""Notices of runs that an older simulator made: gone when they are run again."""

from functools import partial

from benchmarks.paper.report.template import Text
from benchmarks.paper.simulated_code import codes

TARGETS = "targets"
NOTICE = (
    "These runs are of an older simulator: since then pipelines form batches by other rules, and "
    "preempted requests find what is left of their KV."
)
MARK = " (older simulator)"


def older_values() -> dict[str, Text]:
    """``older.targets``: a sentence below its table. ``older.targets.mark``: within a sentence."""
    return {
        f"older.{TARGETS}": partial(_said, NOTICE),
        f"older.{TARGETS}.mark": partial(_said, MARK),
    }


def _said(text: str) -> str:
    return text if TARGETS in codes().older else ""
