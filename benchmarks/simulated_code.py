"""Which code a simulated run is of: a commit does not tell, because most change nothing there."""

import functools
import hashlib
from pathlib import Path

import kunserve

ROOMS = ("core", "policy", "control", "sim", "workload")
"""What decides, what is simulated, and what the requests are drawn by."""
UNKNOWN = "unknown"
"""The code of runs that were kept before this was asked."""


@functools.cache
def code() -> str:
    """Eight hexadecimal digits that differ when any file of these rooms does."""
    root = Path(kunserve.__file__).parent
    found = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:8]
