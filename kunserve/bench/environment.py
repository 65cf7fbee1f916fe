"""The conditions of a run, stored with its result."""

import contextlib
import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import kunserve


def version() -> dict[str, object]:
    """What a simulation depends on besides its settings."""
    return {"kunserve": kunserve.__version__, "commit": _commit()}


def environment() -> dict[str, object]:
    """Date, versions, commit and machine of the client, and how busy the machine is."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


@functools.cache
def _commit() -> str | None:
    """The commit of this checkout, if it is one."""
    root = Path(kunserve.__file__).parent.parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None
