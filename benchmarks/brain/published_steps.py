"""The simulator's step times beside published ones, of engines on real GPUs.

    python -m benchmarks.brain.published_steps

Sarathi-Serve's (OSDI '24, Yi-34B on two A100 PCIe) and Splitwise's (ISCA '24, Llama2-70B on four
A100 or H100): medians of what their repositories publish. They are of the engines of 2023 and
2024. A step with prompts computes one whole prompt; a decode step one request behind 512 tokens.
"""

from typing import NamedTuple

from benchmarks.paper.simulated_code import code
from benchmarks.report import Report
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import SimModel, dense
from kunserve_lab.sim.profile import RooflineTimes

YI_34B = dense("01-ai/Yi-34B", 60, 7168, 20_480, (56, 8, 128), 64_000, 4096)
LLAMA2_70B = dense("meta-llama/Llama-2-70b", 80, 8192, 28_672, (64, 8, 128), 32_000, 4096)


class Published(NamedTuple):
    """Steps of one source: milliseconds by prompt tokens, and of a decode step."""

    source: str
    model: SimModel
    device: str
    num_gpus: int
    prompts_ms: dict[int, float]
    decode_ms: float


PUBLISHED = (
    Published(
        "Sarathi-Serve", YI_34B, "a100", 2,
        {1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.3, 16_384: 4407.5}, 46.8,
    ),
    Published(
        "Splitwise", LLAMA2_70B, "a100", 4,
        {512: 127.0, 1024: 227.1, 2048: 403.3, 4096: 965.2, 8192: 2278.5}, 44.5,
    ),
    Published(
        "Splitwise", LLAMA2_70B, "h100", 4,
        {512: 59.7, 1024: 105.6, 2048: 200.7, 4096: 463.5, 8192: 953.6}, 29.4,
    ),
)  # fmt: skip
DECODE_AFTER_TOKENS = 512


def main() -> None:
    """Every published step, and by how much ours differs."""
    with Report("published_steps", code()) as report:
        for one in PUBLISHED:
            times = RooflineTimes(one.model, find_device(one.device), one.num_gpus)
            steps = [(f"prompt of {n}", 0, n, ms) for n, ms in one.prompts_ms.items()]
            steps.append(("decode", DECODE_AFTER_TOKENS, 1, one.decode_ms))
            for what, start, count, published_ms in steps:
                chunk = Chunk(RequestId("published"), start, count, 1)
                ours_ms = 1e3 * times.stage_s([chunk], one.model.num_layers, is_last=True)
                of = {"source": one.source, "of": f"{one.model.name}, {one.num_gpus} {one.device}"}
                report.add("published", published_ms, "ms", step=what, **of)
                report.add("simulated", ours_ms, "ms", step=what, **of)
                report.add("error", 100 * (ours_ms / published_ms - 1), "%", step=what, **of)


if __name__ == "__main__":
    main()
