"""An instance that tells how much of its time is spent in kernels, for `step_overhead`.

LocalLauncher(program_of(folder))

Every kernel call is timed on the clock of the thread that makes it. After every work that the
instance's loop gives to its body, `account-N` in the folder has a line: the time of the loop's
thread, that of the kernels, and how many steps of layers there were.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kunserve.cluster.instance_start import Loaded, run_instance
from kunserve.cluster.launch import InstanceOrder
from kunserve.engine.kernels import library

WRITTEN_EVERY_S = 0.1

_kernel_s = 0.0


def program_of(folder: Path) -> tuple[str, str]:
    """What ``LocalLauncher`` runs so that instances write accounts to the folder."""
    return (__file__, str(folder))


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and its time is a kernel's."""

    def timed_call(*arguments: Any) -> Any:
        global _kernel_s
        began_s = time.thread_time()
        found = call(*arguments)
        _kernel_s += time.thread_time() - began_s
        return found

    return timed_call


def time_kernels() -> None:
    """Before anything has looked a kernel up."""
    loaded = library.library()
    plain = library.kernel
    cache: dict[tuple[str, Any], Callable[..., Any]] = {}

    def kernel(name: str, dtype: Any) -> Callable[..., Any]:
        if (name, dtype) not in cache:
            cache[name, dtype] = timed(plain(name, dtype))
        return cache[name, dtype]

    found: Any = library
    found.kernel = kernel
    for name in ("kun_argmax",):
        setattr(loaded, name, timed(getattr(loaded, name)))


class TimedBody:
    """A body that writes accounts. Everything else is the body's own."""

    def __init__(self, body: Any, path: Path) -> None:
        self._body = body
        self._file = path.open("w", buffering=1)
        self._num_steps = 0
        self._written_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """What needs no account."""
        return getattr(self._body, name)

    def execute(self, *arguments: Any) -> Any:
        """As the body's own."""
        found = self._body.execute(*arguments)
        self._num_steps += 1
        now_s = time.monotonic()
        if now_s - self._written_s > WRITTEN_EVERY_S:
            self._written_s = now_s
            account = (now_s, time.thread_time(), _kernel_s, self._num_steps)
            self._file.write(" ".join(map(str, account)) + "\n")
        return found


def _load(order: InstanceOrder) -> Loaded:
    time_kernels()
    from kunserve.cluster.instance_main import load_model  # looks kernels up

    loaded = load_model(order)
    path = Path(sys.argv[1]) / f"account-{order.instance_id}-{os.getpid()}"
    body: Any = TimedBody(loaded.body, path)
    return loaded._replace(body=body)


if __name__ == "__main__":
    sys.exit(run_instance(_load))
