"""How this process starts another Python."""

import contextlib
import os
import sys


def python_command() -> list[str]:
    """The Python of a child that runs the code of its parent.

    With ``-m`` a child looks into the working directory first. There may be another ``kunserve``,
    for example a checkout of an older release. So ``-P`` forbids it, unless this process looks
    there too.
    """
    places = {""}
    with contextlib.suppress(FileNotFoundError):  # somebody has removed the directory
        places.add(os.getcwd())
    return [sys.executable] if places & set(sys.path) else [sys.executable, "-P"]
