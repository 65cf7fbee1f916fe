"""Where a number that rises will be, if it goes on so. Pure."""

import math
from collections import deque

LEAST_POINTS = 3
CERTAIN = 2.0
"""Standard errors that a slope must be above nothing: less may be chance."""


class Trend:
    """A number's newest values, and the line through them."""

    def __init__(self, span_s: float) -> None:
        """The line is through values of the last ``span_s``."""
        self._span_s = span_s
        self._points: deque[tuple[float, float]] = deque(maxlen=1000)

    def add(self, now_s: float, value: float) -> None:
        """The number now. Of one moment the first value counts."""
        points = self._points
        if not points or points[-1][0] < now_s:
            points.append((now_s, value))
        while len(points) > 2 and now_s - points[0][0] > self._span_s:
            points.popleft()

    def clear(self) -> None:
        """Nobody knows what it was."""
        self._points.clear()

    def reaches_in_s(self, limit: float, within_s: float) -> float | None:
        """Seconds from the newest value until the line is at ``limit``; 0 where it is; None: it
        does not rise for certain, or not so far ``within_s``.
        """
        if not self._points:
            return None
        slope, value = self._line()
        if value >= limit:
            return 0.0
        if slope <= 0.0 or (limit - value) / slope > within_s:
            return None
        return (limit - value) / slope

    def _line(self) -> tuple[float, float]:
        """Its slope per second, 0 if that may be chance, and where it ends; by least squares."""
        points = self._points
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        if len(points) < LEAST_POINTS or spread <= 0.0:
            return 0.0, points[-1][1]
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
        left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
        error = math.sqrt(left / (len(points) - 2) / spread)
        if slope <= CERTAIN * error:
            return 0.0, mean_y
        return slope, mean_y + slope * (points[-1][0] - mean_x)
