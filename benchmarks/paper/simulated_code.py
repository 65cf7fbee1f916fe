"""Which code a simulated run is of: a commit does not tell, because most change nothing there.

``benchmarks/results/simulated/codes.toml`` says which runs of older code still stand, and why.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from kunserve.core.code import code_of
from kunserve_lab.bench.environment import SIMULATED
from kunserve_lab.compare.results import RunResult

UNKNOWN = "unknown"
"""The code of runs that were kept before this was asked."""
FILE = Path(__file__).parents[1] / "results" / "simulated" / "codes.toml"
PIPELINES = "static-pp"
"""How names of systems begin that have pipelines whatever comes."""
Runs = Literal["all", "without preemptions", "without preemptions and pipelines"]


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Codes of which some runs still are what today's code gives."""

    codes: tuple[str, ...]
    runs: Runs
    because: str
    """What has changed since."""

    def holds(self, run: RunResult) -> bool:
        """Whether the change does not concern the run."""
        if self.runs == "all":
            return True
        if run.num_preemptions:
            return False
        joins = bool(run.num_drops) or run.system.startswith(PIPELINES)
        return self.runs == "without preemptions" or not joins


class Codes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says."""

    today: str
    older: tuple[str, ...]
    """Results that are not of today's code, and are told to be."""
    stand: tuple[Standing, ...]

    def stands(self, run: RunResult) -> bool:
        """Whether a kept run is of today's code, or one that its changes do not concern."""
        made = code_kept(run.environment)
        return made == self.today or any(
            made in group.codes and group.holds(run) for group in self.stand
        )


@functools.cache
def code() -> str:
    """Eight hexadecimal digits that differ when any file of these rooms does."""
    return code_of(SIMULATED)


@functools.cache
def codes() -> Codes:
    """What ``codes.toml`` says."""
    return msgspec.convert(tomllib.loads(FILE.read_text()), Codes)


def code_kept(made: Mapping[str, object]) -> str:
    """The digest that is kept in these conditions of a run, of older ones the commit."""
    return str(made.get("code") or made["commit"])
