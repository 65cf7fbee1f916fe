"""What runs out first in a burst, memory or compute, and what dropping adds: no simulation.

    python -m benchmarks.paper.memory_or_compute

An instance is taken in a steady state: `n` requests of mean lengths decode, and each step brings
as many prompt tokens on average as `n` requests on their way through `out` tokens need. They come
in lumps: where that is less than a prompt, some steps compute a whole prompt (or the token budget)
and the others none. So a step takes `T(n decodes, n * in / out prompt tokens)` on average, and
throughput is `n / (out * T)`. KV memory bounds `n`, the token budget bounds a step.

Per workload: throughput when KV memory is full, as a share of what endless memory would give. Per
depth of dropping: the KV gained, the throughput gained or lost, and for how many seconds a burst of
1.5 times the full-memory throughput fits into the gained KV. In a group of `d` stages each instance
runs `d` microbatches of `1/d` of the layers where it ran one step, and pays the host's part of a
step `d` times. Bubbles are left out.
"""

from dataclasses import dataclass

from benchmarks.report import Report
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile, gpu_profile

MAX_STEP_TOKENS = 2048
BURST_FACTOR = 1.5
DEPTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a device under requests of these mean lengths."""

    name: str
    model: str
    device: str
    input_tokens: int
    output_tokens: int
    memory_utilization: float = 0.9
    gpus: int | None = None

    @property
    def resident_tokens(self) -> float:
        """KV of a request on average over its stay."""
        return self.input_tokens + self.output_tokens / 2


CASES = (
    Case("LongBench, 14B, A800", "Qwen/Qwen2.5-14B", "a800", 5940, 513),
    Case("ShareGPT, 14B, A800", "Qwen/Qwen2.5-14B", "a800", 1660, 373),
    Case("BurstGPT, 14B, A800", "Qwen/Qwen2.5-14B", "a800", 642, 262),
    Case("LongBench, 14B, less memory", "Qwen/Qwen2.5-14B", "a800", 5940, 513, 0.53),
    Case("BurstGPT, 14B, less memory", "Qwen/Qwen2.5-14B", "a800", 642, 262, 0.53),
    Case("LongBench, 72B, 4 H800", "Qwen/Qwen2.5-72B", "h800", 5940, 513),
    Case("LongBench, 72B, 3 H800", "Qwen/Qwen2.5-72B", "h800", 5940, 513, 0.8, 3),
)


def step_s(profile: InstanceProfile, case: Case, num_requests: int, depth: int) -> float | None:
    """Seconds between two tokens of ``num_requests`` per instance, as many microbatches as stages.

    None where a microbatch is over the token budget.
    """
    prompt_tokens = num_requests * case.input_tokens / case.output_tokens
    if num_requests + prompt_tokens > MAX_STEP_TOKENS:
        return None
    lump = min(case.input_tokens, MAX_STEP_TOKENS - num_requests)
    if prompt_tokens >= lump:
        return _all_stages_s(profile, case, num_requests, int(prompt_tokens), depth)
    alone_s = _all_stages_s(profile, case, num_requests, 0, depth)
    lump_s = _all_stages_s(profile, case, num_requests, lump, depth)
    return alone_s + prompt_tokens / lump * (lump_s - alone_s)


def _all_stages_s(
    profile: InstanceProfile, case: Case, num_requests: int, prompt_tokens: int, depth: int
) -> float:
    chunks = [Chunk(RequestId(""), int(case.resident_tokens), 1, True)] * num_requests
    if prompt_tokens >= 2:
        chunks.append(Chunk(RequestId(""), case.input_tokens // 2, prompt_tokens, False))
    layers = profile.spec.num_layers // depth
    inner_s = profile.times.stage_s(chunks, layers, False)
    return (depth - 1) * inner_s + profile.times.stage_s(chunks, layers, True)


def throughput(profile: InstanceProfile, case: Case, pool_tokens: float, depth: int = 1) -> float:
    """Requests per second of an instance with that much KV, full."""
    num_requests = max(1, int(pool_tokens / case.resident_tokens))
    while (seconds := step_s(profile, case, num_requests, depth)) is None:
        num_requests -= 1
    return num_requests / (case.output_tokens * seconds)


def describe(report: Report, case: Case) -> None:
    """The case's figures."""
    profile = gpu_profile(
        find_model(case.model),
        find_device(case.device),
        case.gpus,
        memory_utilization=case.memory_utilization,
    )
    spec, pool = profile.spec, float(profile.pool_tokens)
    weights = spec.num_layers * spec.layer_bytes
    kv_bytes = spec.kv_units * spec.unit_bytes
    full = throughput(profile, case, pool)
    endless = max(throughput(profile, case, pool * factor) for factor in (1, 2, 3, 4, 6, 8, 16))
    report.add("weights", 100 * weights / (weights + kv_bytes), "% of memory", case=case.name)
    report.add("KV", pool, "tokens", case=case.name)
    report.add("full-memory throughput", full, "requests/s", case=case.name)
    report.add("of endless memory's", 100 * full / endless, "%", case=case.name)
    for depth in DEPTHS:
        gained = weights * (1 - 1 / depth) / kv_bytes
        more = throughput(profile, case, pool * (1 + gained), depth)
        held_s = gained * pool / case.resident_tokens / ((BURST_FACTOR - 1) * full)
        report.add("KV gained", 100 * gained, "%", case=case.name, stages=depth)
        report.add("throughput gained", 100 * (more / full - 1), "%", case=case.name, stages=depth)
        report.add("burst of 1.5x held for", held_s, "s more", case=case.name, stages=depth)


def main() -> None:
    """Every case."""
    with Report("memory_or_compute", burst=BURST_FACTOR) as report:
        for case in CASES:
            describe(report, case)


if __name__ == "__main__":
    main()
