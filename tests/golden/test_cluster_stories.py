"""What brains say to each other in a cluster of fake instances, compared line by line.

The real controller and agents over bodies with real memory, led by the test: nothing here depends
on a clock, a processor or the order of a set. ``pytest tests/golden --renew`` writes the logs.
"""

from pathlib import Path

import pytest

from tests.golden.cluster_stories import CLUSTER_STORIES
from tests.golden.kept import compare
from tests.golden.told_cluster import ToldCluster

LOGS = Path(__file__).parent / "cluster"


@pytest.mark.parametrize("name", CLUSTER_STORIES)
def test_log_is_as_kept(name: str, renew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    story = CLUSTER_STORIES[name]
    cluster = ToldCluster(monkeypatch, **story.settings)
    story.play(cluster)
    left = iter(cluster.lines)
    for part in story.shows:
        assert any(part in line for line in left), f"no line (any more) with {part!r}"
    assert len(cluster.lines) < 300, "a log that nobody reads"
    compare(LOGS / f"{name}.txt", cluster.lines, renew)


def test_no_log_without_a_story() -> None:
    assert {path.stem for path in LOGS.iterdir()} == set(CLUSTER_STORIES)
