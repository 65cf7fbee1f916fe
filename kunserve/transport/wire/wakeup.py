"""A flag that one thread raises and another's poll sees."""

import os


class Wakeup:
    """Raised by ``set`` from any thread; its descriptor is readable until ``clear``."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For a poller."""
        return self._fd

    def set(self) -> None:
        """Wake the poller, now or when it next polls."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Lower the flag. Look for work after this, not before, or a wake-up is lost."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Release the descriptor; neither thread may use it any more."""
        os.close(self._fd)
