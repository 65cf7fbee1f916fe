"""Which code a simulated run is of: a commit does not tell, because most change nothing there."""

import functools

from kunserve.core.code import code_of
from kunserve_lab.bench.environment import SIMULATED

UNKNOWN = "unknown"
"""The code of runs that were kept before this was asked."""


@functools.cache
def code() -> str:
    """Eight hexadecimal digits that differ when any file of these rooms does."""
    return code_of(SIMULATED)
