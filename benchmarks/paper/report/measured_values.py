"""What the report's text says of real runs and of checks of the simulator, by name."""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.gpu_kit import kept_day
from benchmarks.paper.kept_results import figures_of, signed
from benchmarks.paper.kept_tables import real
from benchmarks.paper.report import checks, real_bursts
from benchmarks.paper.report.own_tables import bounds
from benchmarks.paper.report.template import Text
from benchmarks.paper.sensitivity import SPEEDS
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.groups import AtLoad
from kunserve_lab.compare.settings import RealSetup
from kunserve_lab.sim.models import find_model

SYSTEMS = ("recompute", "drop", "endless")
BURSTS = {"second": real.SECOND, "first": real.FIRST}
"""The second one fits after a drop. The first is higher, and does not."""
FIELDS = {
    "p50": ("P50 TTFT (s)", "{:.2f} s"),
    "p99": ("P99 TTFT (s)", "{:.1f} s"),
    "tpot": ("P50 TPOT (ms)", "{:.0f} ms"),
    "tpot90": ("P90 TPOT (ms)", "{:.0f} ms"),
    "pause": ("longest pause (s)", "{:.1f} s"),
    "late": (real.LATE, "{:.0%}"),
}


def measured_values() -> dict[str, Text]:
    """Of the real burst and of everything the simulator is held against."""
    return {
        **_real(),
        **_rivals(),
        **_checked(),
        **_faults(),
        **_pairs(),
        **_gpu(),
        "weights.served": _weights_served,
        "real.elsewhere.draws": lambda: str(real_bursts.num_draws_elsewhere()),
        "plan.least": lambda: f"{min(_plan_ms()):.1f}",
        "plan.most": lambda: f"{max(_plan_ms()):.0f}",
        "bound.reached": lambda: f"{100 * max(one.reached for one in bounds()):.0f} %",
        "real-map.points": lambda: str(len(real_bursts.placed())),
        "real-map.within": lambda: str(sum(one.is_within for one in real_bursts.placed())),
    }


def _real() -> dict[str, Text]:
    """Of both bursts whose lengths every system holds, by the names in ``BURSTS``."""
    found: dict[str, Text] = {}
    for place in BURSTS:
        of = f"real.{place}"
        found[f"{of}.rate"] = partial(_rate, place)
        found[f"{of}.rounds"] = partial(_rounds, place)
        found[f"{of}.requests"] = partial(_requests, place)
        found[f"{of}.of-endless"] = partial(_ratio, place, "drop", "endless")
        found[f"{of}.gain"] = partial(_ratio, place, "recompute", "drop")
        for system in SYSTEMS:
            for name, (row, form) in FIELDS.items():
                found[f"{of}.{system}.{name}"] = partial(_told, place, system, row, form)
    return found


def _weights_served() -> str:
    """The share of an instance's memory, where a real model is served."""
    setup = read_experiment(real_bursts.ROOT / "experiments" / "overload.toml").setup
    assert isinstance(setup, RealSetup)
    memory_bytes = int(setup.instance_memory.removesuffix("MiB")) * 2**20
    return f"{100 * find_model(setup.model).weights_bytes / memory_bytes:.0f} %"


def _rivals() -> dict[str, Text]:
    """Time per token of two systems that deal requests out in turn."""

    def told(system: str) -> str:
        groups = real.groups(real.RIVALS)
        return f"{real_bursts.median(groups[min(groups)], system, 'P50 TPOT (ms)'):.0f} ms"

    dealt = ("vllm-rr", "recompute-rr")
    return {f"rivals.{system}.tpot": partial(told, system) for system in dealt}


def _group(place: str) -> AtLoad:
    (group,) = real.groups(BURSTS[place]).values()
    return group


def _rate(place: str) -> str:
    return real.rate(_group(place))


def _rounds(place: str) -> str:
    return str(_group(place).num_each)


def _requests(place: str) -> str:
    return str(_group(place).runs[0].num_requests)


def _told(place: str, system: str, row: str, form: str) -> str:
    return real.spaced(form.format(real_bursts.median(_group(place), system, row)))


def _ratio(place: str, above: str, below: str) -> str:
    """Of the medians of P99 TTFT."""
    one, two = (real_bursts.median(_group(place), name, real.P99) for name in (above, below))
    return f"{one / two:.1f}"


def _checked() -> dict[str, Text]:
    """The simulator beside publications, beside Vidur, and beside real runs."""

    def steps(pick: Callable[[list[float]], float]) -> str:
        lines = figures_of("published_steps")
        return signed(pick([line["value"] for line in lines if line["name"] == "error"]))

    def ratio(pick: Callable[[list[float]], float]) -> str:
        return signed(pick(checks.prediction_errors()))

    def vidur(name: str) -> str:
        return f"{max(checks.vidur_errors(name)):.0f} %"

    def sensitive(of: str, pick: Callable[[list[float]], float]) -> str:
        medians = [
            line["value"]
            for line in figures_of("sensitivity")
            if line["name"] == "P99 TTFT lower" and line["settings"]["of"] == of
        ]
        return f"{pick(medians):.1f}x"

    found: dict[str, Text] = {
        "steps.least": partial(steps, min),
        "steps.most": partial(steps, max),
        "prediction.ratio.least": partial(ratio, min),
        "prediction.ratio.most": partial(ratio, max),
        "prediction.near": lambda: f"{100 * checks.near_predictions():.0f} %",
        "prediction.near.by": lambda: f"{checks.NEAR:.0f} %",
        "sensitivity.by": lambda: f"{100 * (max(SPEEDS.values()) - 1):.0f} %",
        "vidur.p50": partial(vidur, "TTFT P50"),
        "vidur.p99": partial(vidur, "P99"),
        "cost.least": lambda: f"{min(checks.cost_errors('kunserve')):.1f} %",
        "cost.most": lambda: f"{max(checks.cost_errors('kunserve')):.1f} %",
        "cost.blind.most": lambda: f"{max(checks.cost_errors('no attention')):.0f} %",
    }
    for slug, of in (("longbench", "LongBench"), ("heavy", "heavy weights")):
        found[f"sensitivity.{slug}.least"] = partial(sensitive, of, min)
        found[f"sensitivity.{slug}.most"] = partial(sensitive, of, max)
    return found


def _pairs() -> dict[str, Text]:
    """Where a pair's token goes, beside one of single instances at equal load."""

    def median(name: str, form: str) -> str:
        values = [line["value"] for line in figures_of("pipeline_cost") if line["name"] == name]
        return form.format(statistics.median(values))

    return {
        "pair.ratio": partial(median, "pair's TPOT / single's", "{:.2f}"),
        "pair.works": partial(median, "pair: stage 0 works, free cores", "{:.1f} ms"),
        "pair.beside": partial(median, "pair: stage 0 beside, free cores", "{:.1f} ms"),
        "pair.waits": partial(median, "pair: stage 0 waits, free cores", "{:.1f} ms"),
        "pair.bubbles": partial(median, "pair: bubbles on free cores, %", "{:.0f} %"),
        "pair.busier": partial(median, "busier stage / single, processor", "{:.2f}"),
    }


def _gpu() -> dict[str, Text]:
    """Of the day on an H100."""

    def told(form: str, phase: str, name: str, scale: float = 1.0, /, **where: object) -> str:
        return form.format(scale * kept_day.figure(phase, name, **where))

    def first_pause() -> str:
        where = {"transition": "drop", "model": "qwen2.5-14b"}
        return told("{:.0f} ms", "P6", "longest pause of a stream", **where)

    found: dict[str, Text] = {
        "gpu.equal": partial(told, "{:.0f}", "P3", "answers equal to those of transformers"),
        "gpu.answers": partial(told, "{:.0f}", "P3", "answers"),
        "gpu.other": partial(told, "{:.0f}", "P3", "other tokens than float32's"),
        "gpu.tokens": partial(told, "{:.0f}", "P3", "tokens"),
        "gpu.margin": partial(told, "{:.2f}", "P3", "largest margin of those"),
        "gpu.requests": partial(told, "{:.0f}", "P7", "requests"),
        "gpu.recorded": partial(told, "{:.0f}", "P4", "recorded again"),
        "gpu.launched": partial(told, "{:,.0f}", "P4", "graphs launched"),
        "gpu.pause": first_pause,
        "gpu.cost": partial(told, "{:.1f} %", "P8", "held-out error", of="kunserve", batches="all"),
    }
    for region in ("decode", "prefill"):
        found[f"gpu.roofline.{region}"] = partial(
            told,
            "{:.1f}",
            "P8",
            "predicted / measured",
            of=kept_day.SIMULATORS_H100,
            batches=region,
        )
    for world, of in (("real", "gpu"), ("simulated", "gpu.simulated")):
        found[f"gpu.ratio.{world}"] = partial(_gpu_ratio, world)
        for system in kept_day.BURST_SYSTEMS:
            where = {"world": world, "system": system}
            found[f"{of}.{system}.p99"] = partial(told, "{:.1f} s", "P7", "TTFT P99", 1e-3, **where)
            found[f"{of}.{system}.tpot"] = partial(told, "{:.0f} ms", "P7", "TPOT P50", **where)
    return found


def _gpu_ratio(world: str) -> str:
    return f"{kept_day.ratio(world):.2f}"


def _plan_ms() -> list[float]:
    """Of drop plans for 128 instances, in milliseconds."""
    return [
        line["value"]
        for line in figures_of("decisions")
        if line["settings"].get("decision") == "drop plan" and line["name"] == "time"
    ]


def _faults() -> dict[str, Text]:
    """What runs of random faults counted, all together."""
    return {"faults.told": _counted}


def _counted() -> str:
    runs = checks.fault_runs()
    if not runs:
        return "**Nothing is counted yet**: no run is kept."
    asked, same, wrong = (
        sum(getattr(run, name) for run in runs)
        for name in ("num_requests", "num_identical", "num_wrong")
    )
    minutes = sum(run.minutes for run in runs)
    return (
        f"Altogether {asked:,} requests over {minutes:.0f} minutes, {same:,} answered whole and "
        f"identical, {wrong:,} wrong."
    )
