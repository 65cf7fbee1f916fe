"""Writes down which functions of the serving house a process calls, in their order."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import kunserve

HOUSE = str(Path(kunserve.__file__).parent) + os.sep


def write_calls(to: TextIO) -> None:
    """From here on, every call of this thread and of threads that start later is a line."""

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE):
            module = code.co_filename[len(HOUSE) : -len(".py")].replace(os.sep, ".")
            to.write(f"{module}:{code.co_qualname}\n")

    threading.setprofile(on_event)
    sys.setprofile(on_event)


def stop_writing() -> None:
    """For this thread, and for those that start later."""
    threading.setprofile(None)
    sys.setprofile(None)
