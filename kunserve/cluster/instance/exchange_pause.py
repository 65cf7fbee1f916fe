"""How long steps give way to the copies of an exchange."""

QUIET_S = 0.03
"""A step begins once so long nothing has landed here: what is late would hold everybody up."""
LONGEST_S = 0.1
"""A step begins after so long in any case."""


class ExchangePause:
    """Decides whether a step may begin in an exchange whose KV is copied on this machine's cores.

    A step would take them, and everybody whose KV moves waits for the copies. Mail that comes
    meanwhile would be read only after the step's next layer, which takes 20-40 ms on slow cores.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the exchange under way was first seen."""
        self._landed_s = 0.0
        self._bytes_taken = 0

    def gives_way(self, bytes_taken: int, now_s: float) -> bool:
        """In an exchange: ``bytes_taken`` have landed here since the process began."""
        if self._since_s is None:
            self._since_s = self._landed_s = now_s
        elif bytes_taken != self._bytes_taken:
            self._landed_s = now_s
        self._bytes_taken = bytes_taken
        return now_s - self._landed_s < QUIET_S and now_s - self._since_s < LONGEST_S

    def end(self) -> None:
        """No exchange is under way."""
        self._since_s = None
