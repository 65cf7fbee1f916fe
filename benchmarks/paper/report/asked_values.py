"""What the report says of the requests that were held back: the newest release's answer."""

import statistics
from functools import partial

from benchmarks.paper.held_back import held_back
from benchmarks.paper.kept_results import ranged
from benchmarks.paper.report.template import Text
from benchmarks.paper.test_set import anew, in_window, lower, newest

NAMES = {
    "longbench": "claims_longbench_14b",
    "heavy": "claims_heavy_14b",
    "sharegpt": "claims_sharegpt_14b",
}


def asked_values() -> dict[str, Text]:
    """How many times lower P99 TTFT is under `drop`, on requests that nothing was tuned on."""
    found: dict[str, Text] = {
        "asked.draws": lambda: str(len(held_back().seeds)),
        "asked.windows": lambda: str(len(held_back().windows)),
    }
    for slug, experiment in NAMES.items():
        found[f"asked.{slug}"] = partial(_drawn_anew, experiment)
        if experiment in held_back().in_windows:
            found[f"asked.{slug}.windows"] = partial(_in_windows, experiment)
    return found


def _drawn_anew(experiment: str) -> str:
    """In the experiment's own window: median and range of the draws."""
    return ranged(lower(anew(experiment), "recompute", *newest()), "x")


def _in_windows(experiment: str) -> str:
    """In the windows: the median of each one's draws, least to most."""
    numbers = range(1, len(held_back().windows) + 1)
    medians = [
        statistics.median(lower(in_window(experiment, number), "recompute", *newest()))
        for number in numbers
    ]
    return f"{min(medians):.1f}-{max(medians):.1f}x"
