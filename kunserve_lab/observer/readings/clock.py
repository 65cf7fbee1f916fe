"""Seconds since the epoch that never jump: a machine's clock may be set while it watches."""

import time

_BEGAN_S = time.time() - time.monotonic()


def now_s() -> float:
    """As the clock was when the observer began, and the time since."""
    return _BEGAN_S + time.monotonic()
