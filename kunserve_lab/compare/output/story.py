"""What the demo's two runs showed: one sentence, and a chart for the terminal."""

import os
from collections.abc import Sequence

from rich.bar import Bar
from rich.table import Table

from kunserve_lab.bench.timeline import bin_width_s
from kunserve_lab.compare.results import RunResult

HELPS = 1.2
"""Times lower that the wait must be for the sentence to say that dropping helped."""
BUSY = 0.75
"""Of a core each, before the demo began: more is said."""
_MOST_ROWS = 20
_BAR_WIDTH = 24
_COLOURS = ("red", "blue", "green")


def sentence(rival: RunResult, ours: RunResult, busy_before: float) -> str:
    """What was just seen, with its cost; or why nothing was.

    ``busy_before``: how many cores others used when the demo began.
    """
    waits = [run.percentile_s("ttft", 90.0) for run in (rival, ours)]
    paces_ms = [run.percentile_s("tpot", 50.0) * 1e3 for run in (rival, ours)]
    text = (
        f"You just saw the same {ours.num_requests} requests served twice, and two bursts among "
        f"them. With {rival.system} one request in ten waited {waits[0]:.1f} s or longer for its "
        f"first token, with {ours.system} {waits[1]:.1f} s"
    )
    gain = waits[0] / waits[1] if waits[1] else 1.0
    if ours.num_drops == 0:
        return f"{text}: the KV memory did not fill, so nothing was dropped (try a higher --rate)."
    times = "once" if ours.num_drops == 1 else f"{ours.num_drops} times"
    text += f" ({gain:.1f}x shorter)" if gain >= 1 else f" ({1 / gain:.1f}x longer)"
    text += f": layers were dropped {times}, "
    text += f"their memory took KV cache{', and they came back' if ours.num_restores else ''}. "
    if gain < HELPS:
        text += "Here that changed little; another --rate may show more. "
    text += f"Tokens came every {paces_ms[1]:.0f} ms instead of {paces_ms[0]:.0f} ms."
    return f"{text}{_other_work(busy_before)}"


def _other_work(busy_before: float) -> str:
    """That the machine was busy, if it was: ratios waver with it."""
    cpus = os.cpu_count() or 1
    if busy_before <= cpus * BUSY:
        return ""
    return (
        f" Other work used {busy_before:.1f} of {cpus} cores, and is in these waits: "
        "only a quiet machine, or --rounds 3, gives a steady ratio."
    )


def chart(arrival_s: Sequence[float], runs: Sequence[RunResult]) -> Table:
    """The longest TTFT of the requests of each stretch of time, side by side."""
    width_s = bin_width_s(max(arrival_s), _MOST_ROWS)
    rows = [_longest(arrival_s, run, width_s) for run in runs]
    most_s = max((value for row in rows for value in row.values()), default=0.0)
    table = Table(title="Longest time to first token, by moment of arrival", box=None)
    table.add_column("arrived (s)", justify="right")
    for run in runs:
        table.add_column(run.system)
        table.add_column("s", justify="right")
    for number in range(int(max(arrival_s) / width_s) + 1):
        cells: list[Bar | str] = [f"{number * width_s:.0f}-{(number + 1) * width_s:.0f}"]
        for colour, row in zip(_COLOURS, rows, strict=False):
            wait_s = row.get(number, 0.0)
            cells += [Bar(most_s, 0.0, wait_s, width=_BAR_WIDTH, color=colour), f"{wait_s:.1f}"]
        table.add_row(*cells)
    return table


def _longest(arrival_s: Sequence[float], run: RunResult, width_s: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for moment_s, ttft_ms in zip(arrival_s, run.ttft_ms, strict=True):
        if ttft_ms is not None:
            number = int(moment_s / width_s)
            found[number] = max(found.get(number, 0.0), ttft_ms / 1e3)
    return found
