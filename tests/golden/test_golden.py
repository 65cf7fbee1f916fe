"""The stories' logs are kept beside this file and compared line by line.

A change of behaviour shows as a difference of text. When it is meant, ``pytest tests/golden
--renew`` writes the logs anew, and the difference belongs into the commit.
"""

from pathlib import Path

import pytest

from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from tests.golden.event_log import EventLog
from tests.golden.kept import compare
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
    compare(path, lines, renew)


def test_no_log_without_a_story() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == set(STORIES)
