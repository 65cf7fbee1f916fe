"""Text that is kept in a file: compared, or written anew when a change is meant."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST_SHOWN = 80
"""Lines of a difference."""


def compare(path: Path, lines: Sequence[str], renew: bool) -> None:
    """Fail with the difference between the file and the lines; with ``renew`` write the file."""
    if renew:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        pytest.skip(f"wrote {path.name}")
    kept = path.read_text().split("\n")[:-1]
    shown = list(difflib.unified_diff(kept, lines, "kept", "now", n=2, lineterm=""))
    if shown:
        rest = len(shown) - MOST_SHOWN
        ending = [f"... and {rest} lines more"] if rest > 0 else []
        pytest.fail("\n".join(shown[:MOST_SHOWN] + ending), pytrace=False)
