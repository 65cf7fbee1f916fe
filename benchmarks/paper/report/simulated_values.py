"""What the report's text says of simulated clusters, by name, from the kept experiments."""

import re
import statistics
from collections.abc import Iterable
from functools import partial

from benchmarks.paper import burst_map, inside_burst
from benchmarks.paper.claims import CLAIMS
from benchmarks.paper.kept_results import FIXED, figures_of, ranged, runs_of, signed
from benchmarks.paper.map_agreement import compared
from benchmarks.paper.points import UNSEEN, Point, RunKey, kept
from benchmarks.paper.report.template import Text
from kunserve.core.config import OverloadConfig
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.simulated.projection import HELPS, capacity, outlook
from kunserve_lab.compare.slo import FACTOR
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.devices import GIGA, find_device

NAMES = {
    "longbench": "LongBench",
    "whole-trace": "whole trace",
    "sharegpt": "ShareGPT",
    "burstgpt": "BurstGPT-like",
    "72b": "72B",
    "heavy": "heavy weights",
}
"""How the experiments of the claims (`FIXED`) are called in names."""
LIGHT = ("LongBench", "whole trace", "ShareGPT", "BurstGPT-like")
"""Those of Qwen2.5-14B in whole GPUs."""
ABLATIONS = {"light": "ablation", "heavy": "ablation_heavy"}
RESTORATION, PIPELINES = "restoration_burstgpt", "pp_degree_burstgpt"
P99, P50, TPOT = "ttft_p99_s", "ttft_p50_s", "tpot_p50_s"
OUTPUT, TPOT99 = "output_throughput", "tpot_p99_s"
TPOT_TAILS = "tpot_p90_s", TPOT99, "tpot_p999_s"
SYSTEMS = ("recompute", "recompute-least", "recompute-chunk", "tp-pairs", "drop", "endless")
"""Those that the text names; not every experiment has all."""
_WINDOW = re.compile(r"window ([\d.]+) s to ([\d.]+) s")


def simulated_values() -> dict[str, Text]:
    """Of the claims, the ablation, the map and the drawn bursts."""
    found: dict[str, Text] = {
        "claims.light.medians": partial(_span, LIGHT),
        "claims.draws": lambda: str(max(len(_draws(name)) for name in FIXED.values())),
        "claims.draws.least": lambda: str(min(len(_draws(name)) for name in FIXED.values())),
        "weights.light": partial(_weights, "LongBench, 14B, A800"),
        "weights.heavy": partial(_weights, "LongBench, 14B, less memory"),
        "dispatch.lower": _dispatch,
        "objective.factor": lambda: f"{FACTOR:g}",
        "rule.deep-gain": lambda: f"{100 * OverloadConfig().min_deep_gain:.0f} %",
        "unseen.light": partial(_unseen, "bounds_longbench_14b"),
        "unseen.heavy": partial(_unseen, "heavy_weights_14b"),
        "unseen.windows": lambda: str(len({point.later_window_s for point in UNSEEN})),
        "endless.factor": lambda: f"{find_system('endless').memory_factor:g}",
        "links.pair": lambda: f"{find_device('a800').peer_bytes_per_s / GIGA:.0f} GB/s",
        "rise": _rise,
    }
    for claim in CLAIMS:
        slug = re.sub(r"[^a-z0-9]+", "-", claim.what.lower()).strip("-")
        found[f"claim.{slug}"] = claim.ours
        found[f"claim.{slug}.paper"] = partial(str, claim.paper)
    for system in ("recompute", "swap", "migrate"):
        found[f"tail.{system}"] = partial(_tail, system)
    for slug, name in NAMES.items():
        found |= _claim(slug, FIXED[name])
    return found | _ablation() | _bubbles() | _restoration() | _single() | _map() | _bursts()


def _claim(slug: str, name: str) -> dict[str, Text]:
    """One experiment at the load of the claims."""
    found: dict[str, Text] = {
        f"claims.{slug}.lower": partial(_lower, name, "drop", "recompute", P99),
        f"claims.{slug}.lower.median": lambda: f"{_median(name, 'recompute', 'drop', P99):.1f}x",
        f"claims.{slug}.of-endless": lambda: f"{_median(name, 'drop', 'endless', P99):.1f}",
        f"claims.{slug}.tpot": lambda: signed(100 * _median(name, "drop", "recompute", TPOT) - 100),
        f"claims.{slug}.p50.lower": partial(_lower, name, "drop", "recompute", P50),
        f"claims.{slug}.load": lambda: f"{runs_of(name).fixed:g}",
        f"claims.{slug}.kv-mean": partial(_use, name, "mean_kv_usage"),
        f"claims.{slug}.kv-peak": partial(_use, name, "peak_kv_usage"),
    }
    for system in SYSTEMS:
        of = f"claims.{slug}.{system}"
        found[f"{of}.p99"] = partial(_scaled, name, system, P99, "{:.1f} s")
        found[f"{of}.tpot"] = partial(_scaled, name, system, TPOT, "{:.0f} ms", 1e3)
        found[f"{of}.output"] = partial(_scaled, name, system, OUTPUT, "{:,.0f} tokens/s")
        found[f"{of}.late"] = partial(_late, name, system)
    return found


def _draws(name: str) -> dict[int, RunResult]:
    return runs_of(name).draws("drop", runs_of(name).fixed)


def _lower(name: str, system: str, other: str, field: str) -> str:
    """How many times lower the system's is than the other's, with the range over draws."""
    return ranged(runs_of(name).gains(other, field, system), "x")


def _median(name: str, above: str, below: str, field: str) -> float:
    """Of the draws' ratios of one system to another."""
    return statistics.median(runs_of(name).gains(above, field, below))


def _scaled(name: str, system: str, field: str, form: str, scale: float = 1.0) -> str:
    """The median of the draws, in another unit."""
    return form.format(scale * runs_of(name).median(system, field))


def _use(name: str, field: str) -> str:
    """Of the KV memory, under `recompute`."""
    return f"{100 * runs_of(name).median('recompute', field):.0f} %"


def _late(name: str, system: str) -> str:
    runs = runs_of(name)
    return f"{100 * runs.violations(system, runs.fixed):.0f} %"


def _span(names: Iterable[str]) -> str:
    medians = [_median(FIXED[name], "recompute", "drop", P99) for name in names]
    return f"{min(medians):.1f}-{max(medians):.1f}x"


def _weights(case: str) -> str:
    """The share of the memory that weights take."""
    (share,) = (
        line["value"]
        for line in figures_of("memory_or_compute")
        if line["name"] == "weights" and line["settings"]["case"] == case
    )
    return f"{share:.0f} %"


def _dispatch() -> str:
    """How many times lower one central queue has P99 than requests dealt out in turn: medians."""
    medians = [
        _median(name, "recompute-rr", "recompute", P99)
        for name in FIXED.values()
        if runs_of(name).has("recompute-rr")
    ]
    return f"{min(medians):.1f}-{max(medians):.1f}x"


def _unseen(experiment: str) -> str:
    """On the validation windows: the median of each window's draws, least to most."""
    runs = kept("targets")
    medians = []
    for name in (point.name for point in UNSEEN if point.experiment == experiment):
        seeds = [key.seed for key in runs if (key.point, key.system) == (name, "drop")]
        medians.append(
            statistics.median(
                runs[RunKey(name, seed, "recompute")].figures["P99 TTFT"]
                / runs[RunKey(name, seed, "drop")].figures["P99 TTFT"]
                for seed in seeds
            )
        )
    return f"{min(medians):.1f}-{max(medians):.1f}x"


def _tail(system: str) -> str:
    """P99 over P50 TTFT with BurstGPT-like lengths."""
    runs = runs_of(FIXED["BurstGPT-like"])
    draws = runs.draws(system, runs.fixed).values()
    return ranged((run.ttft_p99_s / run.ttft_p50_s for run in draws), "x")


def _rise() -> str:
    """How many times its base a draw's greatest burst is, with BurstGPT-like lengths."""
    name = FIXED["BurstGPT-like"]
    at = runs_of(name).fixed
    rises = []
    for seed in _draws(name):
        scenario = Point(name, name, at, None).scenario(seed)
        expected = outlook(scenario, capacity(scenario))
        assert expected is not None, seed
        rises.append(expected.burst.rate / expected.burst.base_rate)
    return ranged(rises, "x")


def _ablation() -> dict[str, Text]:
    """What each technique gives: P99 TTFT against `recompute`, time per token and output."""
    found: dict[str, Text] = {}
    for slug, name in ABLATIONS.items():
        of = f"ablation.{slug}"
        for system in ("drop-basic", "drop"):
            found[f"{of}.{system}"] = partial(_lower, name, system, "recompute", P99)
        found[f"{of}.drop-basic.tpot"] = partial(_changes, name, "drop-basic", "recompute", TPOT)
        for without in ("priority", "lookahead"):
            pair = name, "drop", f"drop-no-{without}"
            found[f"{of}.{without}.tpot"] = partial(_changes, *pair, *TPOT_TAILS)
            found[f"{of}.{without}.output"] = partial(_changes, *pair, OUTPUT)
    found["ablation.window"] = _window
    points = {experiment: point for point, experiment in inside_burst.ABLATIONS.items()}
    for slug, name in ABLATIONS.items():
        for system in ("drop-basic", "drop"):
            found[f"inside.{slug}.{system}"] = partial(_inside, points[name], system)
    return found


def _changes(name: str, system: str, other: str, *fields: str) -> str:
    """How much more the system has than the other in equal draws: medians and ranges."""
    parts = []
    for field in fields:
        more = [100 / gain - 100 for gain in runs_of(name).gains(other, field, system)]
        parts.append(f"{statistics.median(more):+.0f} ({min(more):+.0f} to {max(more):+.0f})")
    return f"{' / '.join(parts)} %"


def _inside(point: str, system: str) -> str:
    """How many times lower P99 is than under `recompute` of requests that arrive in the burst."""
    return ranged(inside_burst.lower(point, system, 99.0), "x")


def _window() -> str:
    """Of the trace: what latencies of the ablation are over."""
    runs = runs_of(ABLATIONS["light"])
    found = _WINDOW.search(runs.run("drop", runs.fixed).provenance)
    assert found is not None
    return f"{found[1]}-{found[2]} s"


def _bubbles() -> dict[str, Text]:
    def share(system: str) -> str:
        runs = runs_of(ABLATIONS["light"]).draws(system, runs_of(ABLATIONS["light"]).fixed)
        return f"{100 * statistics.median(run.bubble_ratio or 0.0 for run in runs.values()):.1f} %"

    names = ("drop-basic", "drop-no-lookahead", "drop")
    return {f"bubbles.{system}": partial(share, system) for system in names}


def _restoration() -> dict[str, Text]:
    """What restoring changes, against `drop` that never restores."""

    def change(field: str) -> str:
        gains = runs_of(RESTORATION).gains("drop-no-restore", field)
        return signed(statistics.median(100 / gain - 100 for gain in gains))

    fields = {"p50": P50, "p90": "ttft_p90_s", "p99": P99, "tpot": TPOT}
    found: dict[str, Text] = {
        f"restoration.{name}": partial(change, field) for name, field in fields.items()
    }
    found["restoration.tpot99"] = partial(_changes, RESTORATION, "drop", "drop-no-restore", TPOT99)
    return found


def _single() -> dict[str, Text]:
    """Of experiments that one row or sentence names."""
    restored = runs_of(RESTORATION)
    return {
        "restoration.draws": lambda: str(len(restored.draws("drop", restored.fixed))),
        "pipelines.loads": lambda: str(len(runs_of(PIPELINES).loads)),
        "extreme.gain": _extreme_gain,
    }


def _extreme_gain() -> str:
    """KV memory that pairs of the extreme burst's model add."""
    (gain,) = (
        line["value"]
        for line in figures_of("memory_or_compute")
        if line["name"] == "KV gained"
        and (line["settings"]["case"], line["settings"]["stages"]) == ("LongBench, 72B, 4 H800", 2)
    )
    return signed(gain)


def _map() -> dict[str, Text]:
    """How often the fluid model says what the simulator says."""

    def said() -> list[tuple[bool, bool]]:
        return [(one.simulated >= HELPS, one.modelled >= HELPS) for one in compared()]

    return {
        "map.bursts": lambda: str(len(said())),
        "map.agreed": lambda: str(sum(one == other for one, other in said())),
        "map.only-simulator": lambda: str(said().count((True, False))),
        "map.only-map": lambda: str(said().count((False, True))),
        "map.helps": lambda: f"{HELPS:g}x",
        "map.within": lambda: f"{100 * statistics.mean(one.is_within for one in compared()):.0f} %",
        "map.most": lambda: f"{max(one.simulated for one in compared()):.0f}x",
    }


def _bursts() -> dict[str, Text]:
    """Of the drawn bursts."""

    def least(system: str) -> str:
        return f"{min(one.times_lower(system) for one in burst_map.kept()):.2f}x"

    def output(system: str) -> str:
        return f"{min(one.throughput(system) for one in burst_map.kept()):.2f}x"

    return {
        "bursts.num": lambda: str(len(burst_map.kept())),
        "bursts.least": partial(least, "drop"),
        "bursts.least.at-once": partial(least, burst_map.AT_ONCE),
        "bursts.output": partial(output, "drop"),
        "bursts.output.at-once": partial(output, burst_map.AT_ONCE),
        "bursts.most": lambda: f"{max(one.times_lower() for one in burst_map.kept()):.0f}x",
    }
