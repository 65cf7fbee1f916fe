"""The stories' logs are kept beside this file and compared line by line.

A change of behaviour shows as a difference of text. When it is meant, ``pytest tests/golden
--renew`` writes the logs anew, and the difference belongs into the commit.
"""

import difflib
from pathlib import Path

import pytest

from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from tests.golden.event_log import EventLog
from tests.golden.stories import STORIES, Story

LOGS = Path(__file__).parent / "logs"


def tell(story: Story) -> list[str]:
    """The story's log."""
    log = EventLog()
    result = simulate(find_system(story.system), story.scenario, watcher=log, is_drained=True)
    assert result.metrics.num_failed == 0
    return log.lines


@pytest.mark.parametrize("name", sorted(STORIES))
def test_log_is_as_kept(name: str, renew: bool) -> None:
    story, path = STORIES[name], LOGS / f"{name}.txt"
    lines = tell(story)
    left = iter(lines)
    for part in story.shows:
        assert any(part in line for line in left), f"no line (any more) with {part!r}"
    if renew:
        path.write_text("".join(f"{line}\n" for line in lines))
        pytest.skip(f"wrote {path.name}")
    kept = path.read_text().splitlines()
    difference = difflib.unified_diff(kept, lines, "kept", "now", n=2, lineterm="")
    shown = list(difference)
    if shown:
        pytest.fail("\n".join(shown[:80]), pytrace=False)


def test_no_log_without_a_story() -> None:
    assert {path.stem for path in LOGS.iterdir()} == set(STORIES)
