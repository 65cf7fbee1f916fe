"""Tables that only the report has: the bound, a token's time, what lost, the paper's tables."""

import functools
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import Row, markdown
from benchmarks.paper import burst_map
from benchmarks.paper.kept_results import FIXED
from benchmarks.paper.kept_tables.real import ABOVE, ROUNDS
from benchmarks.paper.points import RunKey, kept
from benchmarks.paper.report.checks import faults
from benchmarks.paper.report.real_bursts import folders, placed_table
from benchmarks.paper.report.real_bursts import table as real_bursts
from benchmarks.paper.report.template import Text
from benchmarks.paper.tables import TABLES, Table, slo
from kunserve_lab.compare.slo import FACTORS
from kunserve_lab.sim.devices import GIGA, find_device
from kunserve_lab.sim.fluid import Capacity
from kunserve_lab.sim.models import find_model

DECISIONS = Path(__file__).parents[3] / "docs" / "decisions"
PARTING, TARGETS = "parting", "targets"
"""Benchmarks that have `drop` and `endless` at equal points and seeds."""
GIB = 2**30
CARD_GIB = 80
"""Of one GPU in the paper's table of models."""
PAPERS_MODELS = {
    "Qwen/Qwen2.5-14B": "34.4 %",
    "Qwen/Qwen2.5-72B": "42.3 %",
    "meta-llama/Llama-3.1-405B": "59.1 %",
    "Qwen/Qwen3-235B-A22B": "74.8 %",
    "deepseek-ai/DeepSeek-V3": "61.4 %",
}
"""Model -> the share of the memory that the paper's Table 1 gives its weights."""
PAPERS_CLUSTERS = {
    "a800": "80 GB, no NVLink between servers of one GPU, 200 Gbit/s RDMA",
    "h800": "80 GB, NVLink of 300 GB/s, 400 Gbit/s RDMA",
}
"""Device -> what the paper's Table 2 says of its cluster."""
_LOST = re.compile(
    r"\*\*(?:What lost|Why it lost|Left out|Not built)\.\*\*(.*?)(?=\n\n\*\*|\n## |\Z)", re.DOTALL
)
_MOST_WORDS = 22


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a mix and a share of weights."""

    mix: str
    share: str
    able: Capacity
    most: float
    """Times lower that P99 TTFT is in the drawn burst that gained most."""

    @property
    def reached(self) -> float:
        """The share of the bound."""
        return self.most / self.able.most_gain(burst_map.BASE)


@functools.cache
def bounds() -> tuple[Bound, ...]:
    """Of every mix and share that bursts were drawn for."""
    found = []
    for mix, lengths in burst_map.mixes().items():
        for utilization, share in burst_map.SHARES.items():
            most = max(
                one.times_lower()
                for one in burst_map.kept()
                if one.point.mix == mix and one.point.utilization == utilization
            )
            found.append(Bound(mix, share, burst_map.capacity(utilization, lengths), most))
    return tuple(found)


def bound() -> list[Row]:
    """The bound of each mix and share of weights beside the most that its drawn bursts gained."""
    rows: list[Row] = [
        (
            *("lengths", "weights, of memory", "memory that drops add", "a request stays (s)"),
            *("P99 prompt alone (s)", "bound", "most of all drawn bursts"),
        )
    ]
    for one in bounds():
        able = one.able
        rows.append(
            (
                *(one.mix, one.share, f"+{100 * able.gain:.0f} %", f"{able.residence_s:.0f}"),
                f"{able.floor_s(burst_map.BASE):.1f}",
                *(f"{able.most_gain(burst_map.BASE):.1f}x", f"{one.most:.1f}x"),
            )
        )
    return rows


def token_time() -> list[Row]:
    """What a token takes under `drop`, and how long instances stood in pipelines."""
    parting = kept(PARTING)
    runs = kept(TARGETS) | parting
    rows: list[Row] = [
        (
            *("load", "draws", "P50 TPOT, `drop` (ms)", "P50 TPOT, `endless` (ms)", "more"),
            *("an instance in pipelines (s)", "longest loading of layers (s)"),
        )
    ]
    for point in dict.fromkeys(key.point for key in parting):
        seeds = sorted(key.seed for key in parting if (key.point, key.system) == (point, "drop"))
        ours = [parting[RunKey(point, seed, "drop")].figures for seed in seeds]
        pairs = [
            (one["P50 TPOT"], runs[RunKey(point, seed, "endless")].figures["P50 TPOT"])
            for seed, one in zip(seeds, ours, strict=True)
            if RunKey(point, seed, "endless") in runs
        ]
        more = statistics.median(100 * one / other - 100 for one, other in pairs) if pairs else None
        endless = statistics.median(other for _, other in pairs) if pairs else None
        rows.append(
            (
                *(point, str(len(seeds)), f"{statistics.median(o['P50 TPOT'] for o in ours):.0f}"),
                "-" if endless is None else f"{endless:.0f}",
                "-" if more is None else f"{more:+.0f} %",
                f"{statistics.median(one.get('in pipelines', 0.0) for one in ours):.0f}",
                f"{max(one.get('loading', 0.0) for one in ours):.1f}",
            )
        )
    return rows


def lost() -> list[Row]:
    """Every decision that says what lost: its title, and how that begins."""
    rows: list[Row] = [("decision", "what lost, or was left out")]
    for path in sorted(DECISIONS.glob("*.md")):
        text = path.read_text()
        found = _LOST.search(text)
        if found is not None:
            title = text.splitlines()[0].removeprefix("# ")
            rows.append((f"[{title}](../decisions/{path.name})", _begin(found[1])))
    return rows


def _begin(text: str) -> str:
    """One line: the first points or sentences, without emphasis and links."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "")
    words = plain.split("\n|")[0].split()
    kept_words: list[str] = []
    for word in words:
        kept_words.append(word)
        if len(kept_words) >= _MOST_WORDS and word[-1] in ".;":
            break
    return " ".join(kept_words)


def models() -> list[Row]:
    """The paper's Table 1 beside ours."""
    rows: list[Row] = [("model", "weights (GiB)", "GPUs", "weights, of memory", "the paper's")]
    for name, papers in PAPERS_MODELS.items():
        model = find_model(name)
        gib, gpus = model.weights_bytes / GIB, model.default_num_gpus
        share = f"{100 * gib / (CARD_GIB * gpus):.1f} %"
        rows.append((name, f"{gib:,.0f}", str(gpus), share, papers))
    return rows


def clusters() -> list[Row]:
    """The paper's Table 2 beside what is simulated."""
    rows: list[Row] = [
        ("GPU", "memory (GB)", "inside a server (GB/s)", "between servers (Gbit/s)", "the paper's")
    ]
    for name, papers in PAPERS_CLUSTERS.items():
        device = find_device(name)
        network = 8 * device.network_bytes_per_s / GIGA
        rows.append(
            (
                *(name.upper(), f"{device.memory_bytes / GIGA:.0f}"),
                *(f"{device.peer_bytes_per_s / GIGA:.0f}", f"{network:.0f}", papers),
            )
        )
    return rows


OWN: dict[str, Table] = {
    "bound": Table(bound, ("burst_map",)),
    "token-time": Table(token_time, (PARTING, TARGETS)),
    "real-bursts": Table(real_bursts, folders()),
    "real-on-map": Table(placed_table, (ROUNDS, ABOVE)),
    "faults": Table(faults, ()),
    "late": Table(
        functools.partial(slo, FIXED, FACTORS),
        tuple(f"simulated/{name}" for name in FIXED.values()),
    ),
    "lost": Table(lost, ()),
    "models": Table(models, ()),
    "clusters": Table(clusters, ()),
}
"""Tables of kept results, and of nothing else where none are named."""


def tables() -> dict[str, Text]:
    """Every table by name, as Markdown that stands in docs/report/."""
    found: dict[str, Callable[[], str]] = {}
    for name, table in {**TABLES, **OWN}.items():
        found[name] = functools.partial(_shown, table)
    return found


def _shown(table: Table) -> str:
    """With the code of its results; links go from docs/report/ and not from docs/."""
    text = markdown(table.rows())
    text = re.sub(r"\]\((?!\.\./|https?:|#)", "](../", text)
    text = text.replace("](#", "](../reproduction.md#")
    return f"{text}\n\n*{table.made_by}*" if table.of else text
