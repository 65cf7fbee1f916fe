from dataclasses import dataclass

import pytest

from benchmarks.serving.free_cores import play


@dataclass
class Did:
    """A work, or what came before one that began then."""

    instance: int
    part: str
    microbatch: str
    start_s: float
    cpu_s: float

    @property
    def until_s(self) -> float:
        return self.start_s


def balanced(num: int, *, second_s: float = 4.0, lacks_s: float = 0.0) -> list[Did]:
    """Two microbatches in turns on two stages, each of which computes half of the head."""
    works, now_s = [], 0.0
    for i in range(num):
        name = f"0.{i}"
        works.append(Did(0, "step", name, now_s, 4.0))
        works.append(Did(1, "step", name, now_s + 6.0 + lacks_s, second_s))
        works.append(Did(0, "head", name, now_s + 11.0 + 2 * lacks_s, 1.0))
        works.append(Did(1, "head", name, now_s + 11.0 + 2 * lacks_s, 1.0))
        works.append(Did(0, "sample", name, now_s + 13.0 + 2 * lacks_s, 0.0))
        now_s += 7.0 + lacks_s
    return works


def test_stages_that_wait_for_cores_have_no_bubbles_of_their_own() -> None:
    for lacks_s in (0.0, 50.0):
        first, second = play(balanced(200, lacks_s=lacks_s), [], (0, 1), 0.0)
        assert first.bubbles < 0.02 and second.bubbles < 0.02, (first, second)
        assert first.works_s == second.works_s == pytest.approx(1000.0)


def test_a_shorter_stage_waits_for_the_longer_one() -> None:
    first, second = play(balanced(200, second_s=6.0), [], (0, 1), 0.0)
    assert first.bubbles == pytest.approx(2 / 7, abs=0.02)
    assert second.bubbles < 0.02


def test_what_is_done_beside_is_a_bubble_and_no_wait() -> None:
    works = balanced(200)
    beside = [Did(one.instance, "", "", one.start_s, 0.5) for one in works if one.part == "step"]
    first, second = play(works, beside, (0, 1), 0.0)
    assert first.bubbles == pytest.approx(1 / 11, abs=0.02)
    assert second.waits_s + second.beside_s == pytest.approx(100.0, abs=6.0)


def test_the_way_counts_where_somebody_waits_for_it() -> None:
    quick, slow = (play(balanced(50, second_s=6.0), [], (0, 1), way_s)[0] for way_s in (0.0, 10.0))
    assert slow.waits_s > quick.waits_s + 100.0
