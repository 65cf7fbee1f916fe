"""When to tell that bytes go on coming, so that who waits for all of them waits on."""

TELL_S = 5.0
"""Between two words; a small part of anybody's patience."""


class Arrivals:
    """Knows of which bytes the controller was told."""

    def __init__(self) -> None:
        self._told_bytes = 0
        self._told_s: float | None = None
        """None while nothing is to come."""

    def are_told(self, is_under_way: bool, num_bytes: int, now_s: float) -> bool:
        """Whether to tell now that ``num_bytes`` have come in all. Called often."""
        if not is_under_way:
            self._told_s = None
            return False
        if self._told_s is None:
            self._told_bytes, self._told_s = num_bytes, now_s
        if now_s - self._told_s < TELL_S or num_bytes == self._told_bytes:
            return False
        self._told_bytes, self._told_s = num_bytes, now_s
        return True
