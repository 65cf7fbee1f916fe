"""The conditions of a run, stored with its result: which code it is of, and on which machine."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import kunserve
from kunserve.core.code import HOUSES, code_of
from kunserve.engine.cpu.kernels.levels import processor_name

SIMULATED = (
    *(f"kunserve/{room}" for room in ("core", "model", "policy", "control")),
    *(f"kunserve_lab/{room}" for room in ("sim", "world", "workload")),
)
"""The rooms that decide, that are simulated, and that requests are drawn by."""


def version(rooms: Sequence[str] = HOUSES) -> dict[str, object]:
    """Of which code a run is that begins now: all of it, or that of some rooms.

    A commit does not tell. Most change nothing in these rooms, and two trees that are dirty differ.
    """
    return {"kunserve": kunserve.__version__, "commit": _commit(), "code": code_of(rooms)}


def by_code(conditions: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """How many runs are of which code, in words. Of older runs only the commit is known."""
    names: dict[object, str] = {}
    counts: dict[str, int] = {}
    for one in conditions:
        commit, code = one.get("commit"), one.get("code")
        told = "an unknown commit" if commit is None else f"commit {commit}"
        told += f" with code {code}" if code else ""
        name = names.setdefault(code or commit, told)
        counts[name] = counts.get(name, 0) + 1
    return counts


def environment() -> dict[str, object]:
    """Date, versions, commit and machine of the client, and how busy the machine is."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _commit() -> str | None:
    """The commit of this checkout, if it is one."""
    root = Path(kunserve.__file__).parent.parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None
