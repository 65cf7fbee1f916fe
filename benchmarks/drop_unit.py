"""Would dropping experts beat dropping layers? Step times of both, by the simulator's roofline.

    python -m benchmarks.drop_unit [--figure docs/figures/drop-unit.png]

`d` instances of a sparse model hold one copy. Each of them has `n` requests that decode, or a chunk
of `n` prompt tokens. What takes the time of one round, in which each request gets a token:

*Layers*: an instance has `1/d` of the layers, and runs the `d` microbatches of the group. So in a
round it reads all that one whole model's layers read. Activations cross once for each stage, and
are hidden behind other microbatches. Bubbles are left out.

*Experts*: an instance has every layer, but `1/d` of each layer's experts. It computes the attention
of its own requests, and its experts compute the tokens of all. So its experts are read once for
`d * n` tokens. In each layer tokens go to the instances of their experts and come back: twice a
latency, and `2 * n * hidden` for every other instance that has one of a token's experts. *Hidden*
is the bound at which these bytes cost nothing while anything computes (two halves of a batch take
turns), which nobody reaches.

The second table says how much more than the mean one of so many instances or GPUs has to do, when
experts are chosen alike and at random: what the figures above and the simulator leave out.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.report import Report, Setting
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.sim.devices import Device, find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import RooflineTimes

matplotlib.use("Agg")

CONTEXT = 4000
"""Tokens of KV of a request that decodes."""
DECODES = (1, 4, 16, 64, 256)
PROMPT_TOKENS = 2048
MIXED_DECODES, PROMPT_PER_DECODE = 64, 11
"""LongBench has so many prompt tokens for each one of an answer, and so have most steps."""
_NOBODY = RequestId("")


@dataclass(frozen=True, slots=True)
class Link:
    """Between two instances, one way."""

    name: str
    bytes_per_s: float
    """Of each GPU or host."""
    latency_s: float
    """From the end of one side's kernel to the begin of the other's."""


NVLINK = Link("NVLink", 200e9 * 0.7, 20e-6)
RDMA = Link("RDMA 200 Gbit/s", 25e9 * 0.7, 40e-6)
TEN = Link("10 Gbit/s", 1.25e9 * 0.9, 100e-6)
MEMORY = Link("shared memory", 2.5e9, 30e-6)

CORES = Device(
    name="16 cores",
    memory_bytes=128 << 30,
    peak_flops=16 * 200e9,
    memory_bytes_per_s=150e9,
    matmul_share=1.0,
    attention_share=0.57,
    weight_read_share=1.0,
    kv_read_share=1.0,
    peer_bytes_per_s=150e9,
    network_bytes_per_s=1.25e9,
    host_bytes_per_s=150e9,
    step_overhead_s=0.7e-3,
    layer_overhead_s=20e-6,
    sequence_overhead_s=20e-6,
)
"""A host of CPUs: the rates of our kernels on one core (`policy.cost.assumed_cost`), and memory of
150 GB/s."""


@dataclass(frozen=True, slots=True)
class Case:
    """An instance."""

    model: str
    device: Device
    gpus: int
    links: tuple[Link, ...]

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.model.rpartition('/')[2]}, {self.gpus} x {self.device.name}"


CASES = (
    Case("Qwen/Qwen3-30B-A3B", find_device("a800"), 1, (NVLINK, RDMA, TEN)),
    Case("Qwen/Qwen3-235B-A22B", find_device("h800"), 8, (RDMA, TEN)),
    Case("deepseek-ai/DeepSeek-V3", find_device("h800"), 32, (RDMA, TEN)),
    Case("mistralai/Mixtral-8x7B-v0.1", find_device("a800"), 2, (NVLINK, RDMA, TEN)),
    Case("allenai/OLMoE-1B-7B-0924", CORES, 1, (MEMORY, RDMA, TEN)),
    Case("Qwen/Qwen3-30B-A3B", CORES, 1, (MEMORY, RDMA, TEN)),
)


class Rounds:
    """Seconds of a round in a group of ``depth`` instances."""

    def __init__(self, case: Case, depth: int = 2) -> None:
        self._case = case
        self._depth = depth
        self._model = find_model(case.model)
        self._times = RooflineTimes(self._model, case.device, case.gpus)

    def alone(self, chunks: list[Chunk]) -> float:
        """Nothing is dropped."""
        return self._times.stage_s(chunks, self._model.num_layers, True)

    def layers(self, chunks: list[Chunk]) -> float:
        """Layers are dropped: a microbatch of each instance's own size for each of them."""
        num_layers = self._model.num_layers // self._depth
        inner_s = self._times.stage_s(chunks, num_layers, False)
        last_s = self._times.stage_s(chunks, num_layers, True)
        return (self._depth - 1) * inner_s + last_s

    def experts(self, chunks: list[Chunk], link: Link) -> tuple[float, float]:
        """Experts are dropped: with what crosses the link in sight, and hidden if it can be."""
        model, num_tokens = self._model, sum(chunk[2] for chunk in chunks)
        computed_s = self.alone(chunks)
        computed_s += model.num_layers * (
            self._own_experts_s(num_tokens) - self._times.matmul_s(num_tokens)
        )
        crossing_s = model.num_layers * 2.0 * self._crossing_s(num_tokens, link)
        return computed_s + crossing_s, max(computed_s, crossing_s)

    def _own_experts_s(self, num_tokens: int) -> float:
        """The matrix products of a layer, with this instance's experts for everybody's tokens.

        Their arithmetic is that of its own tokens, because others have what its tokens need.
        """
        model = self._model
        touched = model.experts.touched(self._depth * num_tokens) / self._depth
        read_bytes = (model.dense_params + touched * model.expert_params) * model.dtype_bytes
        return self._times.products_s(num_tokens, read_bytes)

    def _crossing_s(self, num_tokens: int, link: Link) -> float:
        """One way in one layer."""
        model, depth = self._model, self._depth
        goes_there = 1.0 - (1.0 - 1.0 / depth) ** model.experts_per_token
        num_bytes = num_tokens * (depth - 1) * goes_there * model.hidden_size * model.dtype_bytes
        return link.latency_s + num_bytes / (self._case.gpus * link.bytes_per_s)


def decodes(num: int) -> list[Chunk]:
    """So many requests that decode."""
    return [Chunk(_NOBODY, CONTEXT, 1, True)] * num


def prompt(num_tokens: int) -> list[Chunk]:
    """A chunk of a prompt."""
    return [Chunk(_NOBODY, CONTEXT, num_tokens, False)]


def batches() -> Iterator[tuple[str, list[Chunk]]]:
    """What each instance has in a round, by name."""
    for num in DECODES:
        yield f"{num} decodes", decodes(num)
    mixed = decodes(MIXED_DECODES) + prompt(MIXED_DECODES * PROMPT_PER_DECODE)
    yield f"{MIXED_DECODES} decodes, {MIXED_DECODES * PROMPT_PER_DECODE} of a prompt", mixed
    yield f"{PROMPT_TOKENS} of a prompt", prompt(PROMPT_TOKENS)


def compare(report: Report, case: Case) -> None:
    """Every batch over every link."""
    rounds = Rounds(case)
    for name, chunks in batches():
        by_layers_s = rounds.layers(chunks)
        for link in case.links:
            seen_s, hidden_s = rounds.experts(chunks, link)
            settings: dict[str, Setting] = {
                "instance": case.name,
                "each has": name,
                "link": link.name,
            }
            report.add("alone", rounds.alone(chunks) * 1e3, "ms", **settings)
            report.add("layers", by_layers_s * 1e3, "ms", **settings)
            report.add("experts", seen_s * 1e3, "ms", **settings)
            report.add("experts faster by", by_layers_s / seen_s, "x", **settings)
            report.add("hidden", by_layers_s / hidden_s, "x", **settings)


NUM_DRAWS = 50


BALANCED = (
    ("Qwen/Qwen3-30B-A3B", 2),
    ("Qwen/Qwen3-235B-A22B", 8),
    ("deepseek-ai/DeepSeek-V3", 32),
)


def balance(report: Report, model: str, num_parts: int) -> None:
    """The instance or GPU with most to do, over the mean: experts to read, rows to compute."""
    shape = find_model(model)
    generator = np.random.default_rng(0)
    for num_tokens in (4, 32, 256, 2048):
        reads, rows = [], []
        for _ in range(NUM_DRAWS):
            scores = generator.random((num_tokens, shape.num_experts))
            chosen = np.argpartition(scores, shape.experts_per_token)[:, : shape.experts_per_token]
            counts = np.bincount(chosen.ravel(), minlength=shape.num_experts)
            parts = counts.reshape(num_parts, -1)
            touched = (parts > 0).sum(axis=1)
            reads.append(touched.max() / touched.mean())
            rows.append(parts.sum(axis=1).max() / parts.sum(axis=1).mean())
        settings: dict[str, Setting] = {
            "model": model.rpartition("/")[2],
            "parts": num_parts,
            "tokens": num_tokens,
        }
        report.add("most experts read", float(np.mean(reads)), "of the mean", **settings)
        report.add("most rows", float(np.mean(rows)), "of the mean", **settings)


def draw(path: Path) -> None:
    """How many times faster experts are than layers, over decodes per instance; a line per link."""
    figure = Figure(figsize=(12, 5.6), layout="constrained", dpi=120)
    axes = figure.subplots(2, 3, sharex=True).ravel()
    sizes = [2**power for power in range(9)]
    colors = dict(zip((NVLINK, MEMORY, RDMA, TEN), ("#2f855a", "#2f855a", "#2b6cb0", "#c53030"),
                      strict=True))  # fmt: skip
    for axis, case in zip(axes, CASES, strict=True):
        rounds = Rounds(case)
        for link in case.links:
            found = [rounds.experts(decodes(num), link) for num in sizes]
            layers_s = [rounds.layers(decodes(num)) for num in sizes]
            seen = [a / b[0] for a, b in zip(layers_s, found, strict=True)]
            hidden = [a / b[1] for a, b in zip(layers_s, found, strict=True)]
            axis.plot(sizes, seen, color=colors[link], marker=".", label=link.name)
            axis.plot(sizes, hidden, color=colors[link], linestyle=":", linewidth=1)
        axis.axhline(1.0, color="#888888", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(case.name, loc="left", fontsize=9, fontweight="bold")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    for axis in axes[3:]:
        axis.set_xlabel("requests that decode on each instance", fontsize=8)
    for axis in axes[::3]:
        axis.set_ylabel("experts faster than layers (x)", fontsize=8)
    figure.supxlabel("two instances; dotted: if all bytes were hidden behind compute; by the "
                     "simulator's roofline", fontsize=7, color="#666666")  # fmt: skip
    figure.savefig(path)


def main() -> None:
    """Both tables; with a path the picture, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    with Report("drop_unit", instances=2, context=CONTEXT) as report:
        for case in CASES:
            compare(report, case)
        for model, num_parts in BALANCED:
            balance(report, model, num_parts)
    if options.figure is not None:
        draw(options.figure)


if __name__ == "__main__":
    main()
