"""The demo's last words: they say what was seen, also where that is nothing."""

import dataclasses
import io
import os

from rich.console import Console

from kunserve_lab.compare.output.story import chart, sentence
from kunserve_lab.compare.results import RunResult
from tests.lab.bench.comparisons import result


def told(ours_s: float, num_drops: int = 2, num_restores: int = 1) -> str:
    ours = dataclasses.replace(
        result("drop", [ours_s] * 93, tpot_s=0.03), num_drops=num_drops, num_restores=num_restores
    )
    return sentence(result("recompute", [12.1] * 93), ours, 0.0)


def test_a_burst_that_was_helped() -> None:
    assert told(2.7) == (
        "You just saw the same 93 requests served twice, and two bursts among them. With recompute "
        "one request in ten waited 12.1 s or longer for its first token, with drop 2.7 s (4.5x "
        "shorter): layers were dropped 2 times, their memory took KV cache, and they came back. "
        "Tokens came every 30 ms instead of 20 ms."
    )
    assert "dropped once, their memory took KV cache. Tokens" in told(2.7, 1, 0)


def test_a_burst_that_was_not() -> None:
    assert "Here that changed little" in told(11.9)
    assert "with drop 13.0 s (1.1x longer): layers" in told(13.0)
    assert "Here that changed little" in told(13.0)
    nothing = told(12.1, num_drops=0)
    assert nothing.endswith("so nothing was dropped (try a higher --rate).")
    assert "shorter" not in nothing


def test_other_work_on_the_machine_is_said() -> None:
    rival, ours = result("recompute", [12.1] * 93), result("drop", [2.7] * 93)
    ours = dataclasses.replace(ours, num_drops=1)
    for load, is_said in ((0.1, False), (4.0 * (os.cpu_count() or 1), True)):
        assert ("quiet machine" in sentence(rival, ours, load)) == is_said


def drawn(*runs: RunResult) -> list[str]:
    out = io.StringIO()
    arrival_s = [0.5, 1.0, 30.0, 60.0]
    Console(file=out, width=100).print(chart(arrival_s, runs))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_the_chart_has_a_row_for_each_stretch_and_a_bar_for_each_system() -> None:
    first, second = (
        result(name, [0.5, 2.0, longest, 1.0])
        for name, longest in (("recompute", 16.0), ("drop", 4.0))
    )
    title, head, *rows = drawn(first, second)
    assert "first token" in title and "recompute" in head and "drop" in head
    assert [row.split()[0] for row in rows] == [f"{s}-{s + 5}" for s in range(0, 65, 5)]
    assert "2.0" in rows[0], "the longest of two"
    tall = rows[6]
    assert tall.count("█") == 24 + 6 and "16.0" in tall and "4.0" in tall
    assert rows[12].endswith("1.0"), "who comes last has a row"
    assert rows[1].split() == ["5-10", "0.0", "0.0"], "nobody came"
