"""How many examples Hypothesis draws: a commit is judged by few, ``make hunt`` draws many more."""

from hypothesis import settings

COMMIT = 100
"""The default of the profile that judges a commit."""
HUNT = 500
"""The default of the profile ``hunt``."""


def examples(num_for_commit: int) -> int:
    """So many for a commit, and more in the same proportion as a profile's default is above it."""
    return num_for_commit * settings.default.max_examples // COMMIT
