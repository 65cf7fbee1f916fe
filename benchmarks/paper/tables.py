"""The tables of docs/reproduction.md, each a function of the results in benchmarks/results."""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.kept_day import RUNS as GPU_RUNS
from benchmarks.gpu_kit.kept_day import gpu_burst, gpu_day, gpu_steps
from benchmarks.markdown import Row
from benchmarks.paper import burst_map, inside_burst, test_set
from benchmarks.paper.claims import CLAIMS
from benchmarks.paper.instead import INSTEAD_EXPERIMENTS, instead
from benchmarks.paper.kept_results import (
    FIXED,
    LONGBENCH,
    RESULTS,
    Runs,
    figures_of,
    runs_of,
    signed,
)
from benchmarks.paper.kept_tables.peers import peers
from benchmarks.paper.kept_tables.real import (
    ABOVE,
    FIRST,
    RIVALS,
    SECOND,
    SLOW_FIRST,
    SLOW_SECOND,
    VLLM_CLASSES,
    above,
    foretold,
    one_result,
    rivals,
    rounds,
    slow_rounds,
    vllm_classes,
)
from benchmarks.paper.kept_tables.sparse import sparse_bursts, sparse_instances
from benchmarks.paper.map_agreement import EXPERIMENTS, Compared, compared
from benchmarks.paper.simulated_code import code_kept, codes
from benchmarks.paper.sparse_models import NAMES
from kunserve_lab.compare.simulated.projection import HELPS


def claims() -> list[Row]:
    """Claim by claim."""
    head = ("claim", "paper", "ours", "why", "run")
    return [head, *((c.what, c.paper, c.ours(), c.why, c.where) for c in CLAIMS)]


def longbench() -> list[Row]:
    """The first burst, LongBench's lengths, where weights take 36 % of the memory."""
    return _over_loads(runs_of(LONGBENCH))


SHOWN_LOADS = (0.38, 0.4, 0.44, 0.48)


def _over_loads(runs: Runs) -> list[Row]:
    """Loads across, systems down. Where nothing is dropped, `drop` is `recompute`: left out."""
    loads = [at for at in runs.differing if at in SHOWN_LOADS]
    rows: list[Row] = [("load", *(f"{at:g}" for at in loads))]
    for system in ("recompute", "drop-deep", "drop"):
        cells = (f"{runs.run(system, at).ttft_p99_s:.1f}" for at in loads)
        rows.append((f"{system}: P99 TTFT (s)", *cells))
    ratios = [
        runs.run("drop", at).tpot_p50_s / runs.run("recompute", at).tpot_p50_s for at in loads
    ]
    rows.append(("drop: P50 TPOT", *(signed(100 * (ratio - 1)) for ratio in ratios)))
    return rows


AT_FIXED = (
    *("recompute-rr", "recompute-least", "recompute-chunk", "recompute"),
    *("static-pp", "tp-pairs", "drop", "endless"),
)


def fixed() -> list[Row]:
    """TTFT of every system at the load of the claims: medians of the draws."""
    head = ("P50 / P99 TTFT (s)", "KV in use, draws")
    rows: list[Row] = [(*head, *(f"`{system}`" for system in AT_FIXED))]
    for name, experiment in FIXED.items():
        runs = runs_of(experiment)
        cells = (
            f"{runs.median(system, 'ttft_p50_s'):.1f} / {runs.median(system, 'ttft_p99_s'):.1f}"
            if runs.has(system)
            else ""
            for system in AT_FIXED
        )
        draws = runs.draws("recompute", runs.fixed).values()
        full = statistics.median(100 * (run.mean_kv_usage or 0.0) for run in draws)
        rows.append((f"{name}, {runs.fixed:g}", f"{full:.0f} %, {len(draws)}", *cells))
    return rows


SHED_AT = ("LongBench", "BurstGPT-like")
SHEDDING = ("recompute", "recompute-shed", "drop", "drop-shed", "endless")


def shedding() -> list[Row]:
    """Requests in time where the queue has a bound, and how many it refuses: medians of draws."""
    rows: list[Row] = [("requests/s in time, refused", *(f"`{system}`" for system in SHEDDING))]
    for name in SHED_AT:
        runs = runs_of(FIXED[name])
        cells = (
            f"{runs.goodput(system, runs.fixed):.2f}, {100 * runs.refused(system):.0f} %"
            for system in SHEDDING
        )
        rows.append((name, *cells))
    return rows


SLO_NAMES, SLO_FACTORS = ("LongBench", "heavy weights", "72B"), (1.0, 2.0, 4.0, 5.0, 10.0)
"""Some of them: the report has all."""


def slo(names: Iterable[str], factors: Sequence[float]) -> list[Row]:
    """Requests over the objective by its scale, at the load of claims: medians of the draws."""
    rows: list[Row] = [("times the base", *(f"{factor:g}" for factor in factors))]
    for name in names:
        runs = runs_of(FIXED[name])
        for system in ("recompute", "drop", "endless"):
            late = (runs.violations(system, runs.fixed, factor) for factor in factors)
            rows.append((f"{name}: `{system}`", *(f"{100 * share:.0f} %" for share in late)))
    return rows


PROMPTS = (1024, 2048, 4096, 8192, 16_384)


def published_steps() -> list[Row]:
    """By how much simulated steps differ from published ones."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in figures_of("published_steps"):
        if line["name"] == "error":
            settings = line["settings"]
            found.setdefault((settings["source"], settings["of"]), {})[settings["step"]] = line[
                "value"
            ]
    rows: list[Row] = [
        ("simulated against published", *(f"prompt of {n}" for n in PROMPTS), "decode")
    ]
    for (source, of), errors in found.items():
        steps = (*(f"prompt of {n}" for n in PROMPTS), "decode")
        cells = (signed(errors[step]) if step in errors else "-" for step in steps)
        rows.append((f"{source}: {of}", *cells))
    return rows


def sensitivity() -> list[Row]:
    """The claims' ratios with step times a quarter slower and faster: three draws."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for line in figures_of("sensitivity"):
        settings = line["settings"]
        found.setdefault(settings["times"], {})[settings["of"], line["name"]] = line["value"]
    names = tuple(dict.fromkeys(of for values in found.values() for of, _ in values))
    columns = tuple((of, what) for of in names for what in ("P99 TTFT lower", "P50 TPOT"))
    rows: list[Row] = [("step times", *(f"{of}: {what}" for of, what in columns))]
    for times, values in found.items():
        cells = []
        for of, what in columns:
            middle, least, most = (values[of, f"{what}{end}"] for end in ("", ", least", ", most"))
            form = "{:.1f}x" if what == "P99 TTFT lower" else "{:+.0f} %"
            cells.append(f"{form.format(middle)} ({least:.1f} to {most:.1f})")
        rows.append((times, *cells))
    return rows


def memory_or_compute() -> list[Row]:
    """What full memory gives, and what each depth of dropping adds and costs."""
    found: dict[tuple[Any, ...], float] = {}
    for line in figures_of("memory_or_compute"):
        settings = line["settings"]
        found[settings["case"], settings.get("stages"), line["name"]] = line["value"]
    cases = list(dict.fromkeys(case for case, _, _ in found))
    rows: list[Row] = [
        (
            *("", "weights, of memory", "throughput, of endless memory's"),
            *(f"{name}: KV, throughput" for name in ("pairs", "fours")),
        )
    ]
    for case in cases:
        cells = [
            f"{signed(found[case, depth, 'KV gained'])}, "
            f"{signed(found[case, depth, 'throughput gained'])}"
            for depth in (2, 4)
        ]
        weights = found[case, None, "weights"]
        full = found[case, None, "of endless memory's"]
        rows.append((case, f"{weights:.0f} %", f"{full:.0f} %", *cells))
    return rows


def agreement() -> list[Row]:
    """What simulator and map say of the same bursts."""
    groups: dict[str, list[Compared]] = {}
    for one in compared():
        is_drawn = one.where not in EXPERIMENTS
        groups.setdefault("drawn bursts" if is_drawn else "kept experiments", []).append(one)
    rows: list[Row] = [
        ("of", "bursts", "drops help: both say so", "neither", "only the simulator", "only the map")
    ]
    everything = [one for group in groups.values() for one in group]
    for name, some in (*groups.items(), ("**all**", everything)):
        said = [(one.simulated >= HELPS, one.modelled >= HELPS) for one in some]
        cells = ((True, True), (False, False), (True, False), (False, True))
        rows.append((name, str(len(some)), *(str(said.count(cell)) for cell in cells)))
    return rows


PREDICTED = ("drop", "endless")
RATIOS = ("TTFT P50", "TTFT P90", "TTFT P99")
STEPS_OF = {"profile": "by the profile", "its pace": "at each run's pace"}
SAME_HOUR = "AVX2"
"""In the names of bursts whose profile is of their hour."""
_DRAW = re.compile(r"-(?:load)?[\d.]+(?:-seed(\d+))?$")


def predicted() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """By burst, its steps, system and ratio: what was real, and what was simulated."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for line in figures_of("prediction_ratio"):
        settings = line["settings"]
        if settings["times"] == 1.0 and settings["system"] in PREDICTED:
            of = _DRAW.search(settings["of"])
            burst = settings["of"] if of is None else settings["of"][: of.start()]
            draw = of and of[1]
            burst += f", draw {draw}" if draw not in (None, "0") else ""
            key = burst, settings["step_times"], settings["system"], settings["ratio"]
            found.setdefault(key, {})[line["name"]] = line["value"]
    return found


def prediction() -> list[Row]:
    """How many times lower TTFT is than under `recompute`: real bursts, and their simulations."""
    found = predicted()
    rows: list[Row] = [("real, by the profile, at its pace", "system", *RATIOS)]
    for burst, system in dict.fromkeys((burst, system) for burst, _, system, _ in found):
        cells = []
        for ratio in RATIOS:
            kept = [found.get((burst, steps, system, ratio)) for steps in STEPS_OF]
            told = [one for one in kept if one is not None]
            values = [told[0]["real"], *(one["simulated"] for one in told)]
            cells.append(", ".join(f"{value:.1f}x" for value in values))
        rows.append((burst, f"`{system}`", *cells))
    return rows


def prediction_errors() -> list[Row]:
    """By how much simulated ratios miss real ones: the median of the bursts, and the worst."""
    missed: dict[tuple[str, str, str], list[float]] = {}
    for (burst, steps, system, ratio), one in predicted().items():
        kind = SAME_HOUR if SAME_HOUR in burst else "AVX-512"
        error = 100 * abs(one["simulated"] / one["real"] - 1)
        missed.setdefault((f"{kind}, {STEPS_OF[steps]}", system, ratio), []).append(error)
    rows: list[Row] = [("missed by: median, worst", "system", "bursts", *RATIOS)]
    for where, system in dict.fromkeys((where, system) for where, system, _ in missed):
        errors = [missed[where, system, ratio] for ratio in RATIOS]
        cells = (f"{statistics.median(some):.0f}, {max(some):.0f} %" for some in errors)
        rows.append((where, f"`{system}`", str(len(errors[0])), *cells))
    return rows


OLDER = "; some not run again by today's simulator"


def standing() -> list[Row]:
    """Which runs of older code stand, and what has changed since."""
    rows: list[Row] = [("of code", "stand", "because since then")]
    rows.append((f"{codes().today} (today's)", "all", "-"))
    rows += [(", ".join(one.codes), one.runs, one.because) for one in codes().stand]
    return rows


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a document, and the results that it is made of."""

    rows: Callable[[], list[Row]]
    of: tuple[str, ...]
    """Files of benchmarks/results, `.jsonl` by default, or folders with a ``results.jsonl``."""

    @property
    def made_by(self) -> str:
        """Which code those are of: the rooms' digest, or the commit where none was kept."""
        found: dict[str, None] = {}
        for name in self.of:
            path = RESULTS / name
            path = path / "results.jsonl" if path.is_dir() else path.with_suffix(".jsonl")
            for line in map(json.loads, path.read_text().splitlines()):
                found[code_kept(line.get("environment", line))] = None
        older = not {Path(name).name for name in self.of}.isdisjoint(codes().older)
        return f"Code: {', '.join(sorted(found))}{OLDER if older else ''}."


def _simulated(*names: str) -> tuple[str, ...]:
    return tuple(f"simulated/{name}" for name in names)


_CLAIMS = _simulated(
    *FIXED.values(),
    "ablation",
    "ablation_heavy",
    "restoration_burstgpt",
    "pp_degree_burstgpt",
    "extreme_burst",
)
TABLES: dict[str, Table] = {
    "claims": Table(claims, (*_CLAIMS, "cost_model")),
    "slo": Table(partial(slo, SLO_NAMES, SLO_FACTORS), _simulated(*FIXED.values())),
    "longbench": Table(longbench, _simulated(LONGBENCH)),
    "memory-or-compute": Table(memory_or_compute, ("memory_or_compute",)),
    "agreement": Table(agreement, (*_simulated(*EXPERIMENTS), "map_agreement", "burst_map")),
    "burst-map": Table(burst_map.table, ("burst_map",)),
    "fixed": Table(fixed, _simulated(*FIXED.values())),
    "instead": Table(instead, _simulated(*INSTEAD_EXPERIMENTS)),
    "test-set": Table(test_set.table, (test_set.BENCHMARK,)),
    "inside-burst": Table(
        inside_burst.table,
        (inside_burst.BENCHMARK, *_simulated(*inside_burst.ABLATIONS.values())),
    ),
    "shedding": Table(shedding, _simulated(*(FIXED[name] for name in SHED_AT))),
    "peers": Table(peers, ("peers",)),
    "prediction": Table(prediction, ("prediction_ratio",)),
    "prediction-errors": Table(prediction_errors, ("prediction_ratio",)),
    "standing": Table(standing, ()),
    "sparse-instances": Table(sparse_instances, ("sparse_models",)),
    "sparse-models": Table(sparse_bursts, _simulated(*NAMES)),
    "published-steps": Table(published_steps, ("published_steps",)),
    "sensitivity": Table(sensitivity, ("sensitivity",)),
    "one-result": Table(one_result, (SECOND, FIRST)),
    "real-rounds": Table(rounds, (SECOND, FIRST)),
    "real-slow": Table(slow_rounds, (SLOW_SECOND, SLOW_FIRST)),
    "real-vllm-classes": Table(vllm_classes, (VLLM_CLASSES,)),
    "observe-truth": Table(foretold, ("observe_truth",)),
    "real-rivals": Table(rivals, (RIVALS,)),
    "real-above": Table(above, (ABOVE,)),
    "gpu-day": Table(gpu_day, (GPU_RUNS,)),
    "gpu-burst": Table(gpu_burst, (GPU_RUNS,)),
    "gpu-steps": Table(gpu_steps, (GPU_RUNS,)),
}
