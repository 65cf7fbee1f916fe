"""The test set: seeds and windows that are held back, and who may ask for them.

``test_set.toml`` names them. Only ``test_set`` runs them, so that a figure of theirs is of requests
that nothing was tuned on.
"""

import functools
import tomllib
from pathlib import Path

import msgspec

from kunserve.core.errors import ConfigError

FILE = Path(__file__).with_name("test_set.toml")


class HeldBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says."""

    seeds: tuple[int, ...]
    systems: tuple[str, ...]
    draws: tuple[str, ...]
    """Experiments that these seeds draw anew."""
    in_windows: tuple[str, ...]
    """Experiments that are run with the arrivals of the windows."""
    windows: tuple[tuple[float, float], ...]
    """(from, to) in seconds of ``points.later_azure_trace``."""

    def check_free(self, seed: int, window_s: tuple[float, float] | None) -> None:
        """Raise ConfigError for what is held back; ``window_s`` None is another trace's."""
        if seed in self.seeds:
            raise ConfigError(f"seed {seed} is held back for the test set ({FILE.name})")
        for start_s, end_s in self.windows:
            if window_s is not None and window_s[0] < end_s and start_s < window_s[1]:
                raise ConfigError(
                    f"the window from {window_s[0]:g} to {window_s[1]:g} s overlaps one that is "
                    f"held back for the test set ({FILE.name}): {start_s:g} to {end_s:g} s"
                )


@functools.cache
def held_back() -> HeldBack:
    """What ``test_set.toml`` says."""
    return msgspec.convert(tomllib.loads(FILE.read_text()), HeldBack)
