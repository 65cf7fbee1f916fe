"""The tables of docs/gpu.md and docs/decisions/simulator.md: what an H100 showed, and what not.

``benchmarks/results/gpu-h100`` has what calls A, B and C of ``benchmarks/gpu_day.py`` left on one
machine on 2026-11-28. Taken out by hand: logs, what ``kunserve doctor`` said, the kernel's build in
``platform``, and the folder of the profile's model, whose name stands in its place.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import RESULTS
from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.sim.devices import find_device

DAY = RESULTS / "gpu-h100"
PROFILE = RESULTS / "profile-qwen2.5-7b-h100.json"
RUNS = "gpu-h100/P7.runs.jsonl"
"""Of the same code as all phases are."""
BURST_SYSTEMS = ("recompute", "drop")
SIMULATORS_H100, FITTED = "simulator's h100", "simulator's, fitted"
NOT_RUN = "not run"
_REGIONS = ("decode", "mixed", "prefix", "prefill", "all")
_BATCHES = (1, 32, 256)
_SERVED_KIB = 65536
"""Granules of a served GPU instance."""
_TILES = "64 keys, 4 warps, 3 stages"
_H200_MS = {
    "7B": ((4.4, 5.0, 11.5), (4.0, 4.6, 10.5)),
    "14B": ((8.4, 10.4, 26.0), (7.7, 9.5, 24.0)),
}
"""Expected on an H200, before any run: decode steps of ours, and of vLLM, by ``_BATCHES``."""


@functools.cache
def phase(name: str) -> dict[str, Any]:
    """What a phase left."""
    found: dict[str, Any] = json.loads((DAY / f"{name}.json").read_text())
    return found


def figures(of: str, name: str, /, **where: object) -> list[float]:
    """All values of that name that have these settings, in order."""
    found = [
        one["value"]
        for one in phase(of)["figures"]
        if one["name"] == name and where.items() <= one["settings"].items()
    ]
    if not found:
        raise KeyError(f"{of} has no {name!r} of {where}")
    return found


def figure(of: str, name: str, /, **where: object) -> float:
    """The only one of them."""
    (value,) = figures(of, name, **where)
    return value


def ratio(world: str) -> float:
    """P99 TTFT of ``recompute`` over that of ``drop`` in the burst."""
    return figure("P7", "TTFT P99, recompute / drop", world=world)


def gpu_day() -> list[Row]:
    """What was seen beside what was expected."""
    head = ("what", "seen on an H100", "expected")
    return [head, *_right(), *_drops(), *_steps(), *_device(), *_parts()]


def _right() -> list[Row]:
    equal = figure("P3", "answers equal to those of transformers", dtype="float32")
    other, margin = (
        figure("P3", name, dtype="bfloat16")
        for name in ("other tokens than float32's", "largest margin of those")
    )
    tokens = figure("P3", "tokens", dtype="bfloat16")
    errors = {
        dtype: max(max(figures("P2", name, dtype=dtype)) for name in ("attention", "rotation"))
        for dtype in ("float32", "bfloat16")
    }
    return [
        (
            "P3: float32 answers through a drop and a restore that are those of transformers",
            f"{equal:.0f} of {figure('P3', 'answers', dtype='float32'):.0f}",
            "all",
        ),
        (
            "P3: other tokens in bfloat16; the reference prefers another by at most",
            f"{other:.0f} of {tokens:.0f}; {margin:.2f}",
            f"below {_setting('P3', 'tolerance')}",
        ),
        (
            "P2: largest error of kernels, float32, bfloat16",
            f"{errors['float32']:.0e}, {errors['bfloat16']:.3f}; experts {NOT_RUN}",
            "below 1e-4, 0.03",
        ),
    ]


def _setting(of: str, key: str) -> object:
    return next(one["settings"][key] for one in phase(of)["figures"] if key in one["settings"])


def _drops() -> list[Row]:
    names = ("prepare a drop", "commit a drop", "unmap after a drop, all")
    mapped = (figures("P1", name, granule_kib=_SERVED_KIB) for name in names)
    prepare, commit, unmap = (figure("P4", f"{name}, most", graphs=True) for name in names)
    again, launched = (figure("P4", name) for name in ("recorded again", "graphs launched"))
    alone, beside = (
        figure("P1", f"queue of attention, {how}")
        for how in ("alone", "beside a drop and a restore")
    )
    return [
        (
            "P1: half of 14B's layers: prepare, commit, unmap (ms)",
            ", ".join(f"{min(some):.2g}-{max(some):.2g}" for some in mapped),
            "commit below 1",
        ),
        ("P1: attention beside it, of alone", f"{beside / alone:.2f}", "1"),
        (
            "P4: a drop of 1.5B with graphs alive, at most (ms)",
            f"{prepare:.0f}, {_below(commit, 1.0, '.1f')}, {unmap:.1f}",
            "commit below 1",
        ),
        ("P4: graphs recorded again", f"{again:.0f} of {launched:,.0f} launched", "none"),
        *_under_load(),
    ]


def _under_load() -> list[Row]:
    """Two processes on one GPU. Its memory held 14 streams of 14B (``load.streams_of``)."""
    pauses, exchanges, gaps, remaps = (
        [figures("P6", name, transition=kind) for kind in ("drop", "restore")]
        for name in ("longest pause of a stream", "exchange", "commit gap", "remap")
    )
    return [
        (
            "P6: a drop beside 14 streams of 14B, 64 of 7B, 64 of 7B with KV sent by sockets: "
            "books changed in (ms)",
            _told(remaps[0], ".2f"),
            "below 1",
        ),
        ("steps held up by its commit (ms)", _told(gaps[0], ".0f"), ""),
        (
            "longest pause of a stream (ms)",
            ", ".join(_below(pause, 10.0, ",.0f") for pause in pauses[0]),
            "below 10",
        ),
        ("exchange within one device (GB/s)", _told(exchanges[0], ".1f"), ""),
        (
            "the last three of restores",
            "; ".join(
                (_told(gaps[1], ".0f"), _told(pauses[1], ",.0f"), _told(exchanges[1], ".1f"))
            ),
            "",
        ),
    ]


def _steps() -> list[Row]:
    where = {"model": "qwen2.5-7b"}
    whole, layers, by_layers = (
        [figure("P5", name, batch=batch, **where) for batch in _BATCHES]
        for name in ("step by one graph", "its layers on the device", "step by graphs of layers")
    )
    read = [figure("P5", "step reads", graphs=True, batch=batch, **where) for batch in _BATCHES]
    beyond = [one - other for one, other in zip(whole, layers, strict=True)]
    less = [other - one for one, other in zip(whole, by_layers, strict=True)]
    ours, vllm = (_on_an_h100(some) for some in _H200_MS["7B"])
    seen = (_below(one, most, ".1f") for one, most in zip(whole, ours, strict=True))
    return [
        (
            "P5: a decode step of 7B at 1, 32, 256 (ms)",
            ", ".join(seen),
            f"{_told(ours, '.1f')}; of vLLM {_told(vllm, '.1f')}",
        ),
        (
            "the same of 14B",
            NOT_RUN,
            "; of vLLM ".join(_told(_on_an_h100(some), ".0f") for some in _H200_MS["14B"]),
        ),
        (
            "7B's reads, of what the device copies (GB/s)",
            f"{_told(read, ',.0f')} of {figure('P0', 'copy, read and written'):,.0f}",
            "",
        ),
        ("beyond its layers (ms)", _told(beyond, ".1f"), ""),
        (
            "less than by graphs of layers (ms)",
            ", ".join(_above(one, 0.1, ".1f") for one in less),
            "0.1-0.2",
        ),
        *_other_steps(),
    ]


def _other_steps() -> list[Row]:
    by_graphs, without = (figure("P5", "mixed step", graphs=graphs) for graphs in (True, False))
    asked, longer = (
        figure("P5", "of it the host asks for", graphs=graphs) for graphs in (True, False)
    )
    drawn, greedy = (figures("P5", "sampled in", way=way) for way in ("Qwen's own", "greedy"))
    prompts = figures("P5", "prompt speed", ops="triton")
    return [
        (
            "a mixed step of 319 tokens by graphs, without (ms)",
            f"{_below(by_graphs, without, '.1f')}, {without:.1f}",
            "graphs faster",
        ),
        (
            "asked for in (ms)",
            f"{_below(asked, 0.5, '.1f')}, {_below(longer, 9.0, '.1f')}",
            "0.5, 5-9",
        ),
        (
            "1 to 256 rows drawn as Qwen asks, greedy (ms)",
            f"{_below(min(drawn), 1.0, '.1f')}-{_below(max(drawn), 1.0, '.1f')}, "
            f"{min(greedy):.1f}-{max(greedy):.1f}",
            "1 at 256",
        ),
        (
            "prompts of 512, 2k, 8k tokens, of products (TFLOP/s)",
            f"{_told(prompts, '.0f')} of {figure('P0', 'bfloat16 product'):.0f}",
            "",
        ),
    ]


def _device() -> list[Row]:
    hop, added = (figure("S", name) for name in ("hop there and back", "added to a step"))
    pinned, pieces = (figures("P0", "to host memory", by=by) for by in ("pinned", "pieces"))
    beside, alone = (
        figure("P0", f"queue of products, {how}") for how in ("beside copies to the host", "alone")
    )
    return [
        (
            "S: a hop there and back, added to a step (ms)",
            f"{_below(hop, 0.3, '.2f')}, {_below(added, 0.2, '.2f')}",
            "below 0.3, 0.2",
        ),
        (
            "P0: KV to and from host memory, pinned, in pieces (GB/s)",
            f"{min(pinned):.0f}-{max(pinned):.0f}, {min(pieces):.0f}-{max(pieces):.0f}",
            "50, 2-6",
        ),
        ("products beside copies, of alone", f"{beside / alone:.2f}", "1"),
    ]


def _parts() -> list[Row]:
    many, few = (
        figure("P5b", "attention reads", tiles=f"{_TILES}, {parts} parts", context=32768)
        for parts in (64, 16)
    )
    units, packed = (
        figures("P5b", "attention reads", by=by, tiles="served")
        for by in ("triton", "triton, packed")
    )
    costs = [100 * (other / one - 1) for one, other in zip(units, packed, strict=True)]
    error, largest = (
        figure("P8", name, of="kunserve", batches="all") for name in ("held-out error", "largest")
    )
    return [
        (
            "P5b: 32k tokens read by 64 parts, of by 16",
            _above(many / few, 1.5, ".2f"),
            "1.5",
        ),
        ("a packed layout is faster by (%)", f"{min(costs):.1f} to {max(costs):.1f}", ""),
        ("P8: the cost model's error, mean, largest (%)", f"{error:.1f}, {largest:.0f}", ""),
    ]


def _told(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def _below(value: float, most: float, form: str) -> str:
    """Bold where it is more, as shown, than was expected."""
    told = format(value, form)
    return f"**{told}**" if float(told.replace(",", "")) > most else told


def _above(value: float, least: float, form: str) -> str:
    """Bold where it is less."""
    told = format(value, form)
    return f"**{told}**" if float(told.replace(",", "")) < least else told


def _on_an_h100(h200_ms: Sequence[float]) -> list[float]:
    """What was expected on an H200, by the rates of their memories; to a tenth."""
    slower = find_device("h200").memory_bytes_per_s / find_device("h100").memory_bytes_per_s
    return [round(slower * ms, 1) for ms in h200_ms]


def gpu_burst() -> list[Row]:
    """The burst on real servers, and in the simulator."""
    heads = ("P50 TTFT (s)", "P99 TTFT (s)", "P50 TPOT (ms)", "P99 TPOT (ms)", "preempted", "drops")
    rows: list[Row] = [("", *heads)]
    for world in ("real", "simulated"):
        for system in BURST_SYSTEMS:
            ttft, tpot = (
                [figure("P7", f"{name} P{at}", world=world, system=system) for at in (50, 99)]
                for name in ("TTFT", "TPOT")
            )
            counts = (
                figure("P7", name, world=world, system=system) for name in ("preemptions", "drops")
            )
            rows.append(
                (
                    f"{world}: `{system}`",
                    *(f"{ms / 1e3:.2f}" for ms in ttft),
                    *(f"{ms:.0f}" for ms in tpot),
                    *(f"{count:.0f}" for count in counts),
                )
            )
    lower: Row = ("`recompute` / `drop`: real, simulated", "", _both(), "", "", "", "")
    return [*rows, lower]


def _both() -> str:
    return ", ".join(f"{ratio(world):.2f}" for world in ("real", "simulated"))


def burst_runs() -> dict[str, RunResult]:
    """The real run of each system."""
    return {run.system: run for run in load(RESULTS / RUNS)}


def gpu_steps() -> list[Row]:
    """By how much the simulator's steps of 7B differ from those of the device."""
    rows: list[Row] = [("predicted / measured, mean error", *_REGIONS)]
    for of, title in ((SIMULATORS_H100, "`--device h100`"), (FITTED, "a profile, held out")):
        cells: Callable[[str], str] = functools.partial(_cell, of)
        rows.append((title, *map(cells, _REGIONS)))
    return rows


def _cell(of: str, region: str) -> str:
    times, error = (
        figure("P8", name, of=of, batches=region) for name in ("predicted / measured", "error")
    )
    return f"{times:.2f}, {error:.0f} %"
