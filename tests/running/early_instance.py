"""An instance with a planted fault: copies of KV count as done when they have only been asked for.

ForkingLauncher((__file__,))
"""

import sys

from kunserve.cluster.instance.main import load_model
from kunserve.cluster.instance.start import run_instance
from kunserve_extras.torch_body.cuda.host_kv import HostCopies


def does_not_wait(copies: HostCopies) -> bool:
    """In the place of ``HostCopies.wait``."""
    was_under_way, copies._is_under_way = copies._is_under_way, False
    return was_under_way


def is_never_copying(copies: HostCopies) -> bool:
    """In the place of ``HostCopies.is_copying``."""
    copies._is_under_way = False
    return False


if __name__ == "__main__":
    HostCopies.wait = does_not_wait  # type: ignore[method-assign]
    HostCopies.is_copying = property(is_never_copying)  # type: ignore[method-assign, assignment]
    sys.exit(run_instance(load_model))
