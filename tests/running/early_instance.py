"""An instance with a planted fault: copies of KV count as done when they have only been asked for.

ForkingLauncher((__file__,))
"""

import sys
from collections.abc import Callable

from kunserve.cluster.instance.main import load_model
from kunserve.cluster.instance.start import run_instance
from kunserve_extras.torch_body.cuda.host_kv import HostCopies, PinnedKv


def does_not_wait(kept: PinnedKv, look_up: Callable[[], None] | None) -> None:
    """In the place of ``PinnedKv.wait``."""
    kept.begin()
    kept._copies._is_under_way = False
    kept._pool.give(kept._leaving)
    kept._leaving = []


if __name__ == "__main__":
    PinnedKv.wait = does_not_wait  # type: ignore[method-assign]
    HostCopies.is_copying = property(lambda copies: False)  # type: ignore[method-assign, assignment]
    sys.exit(run_instance(load_model))
