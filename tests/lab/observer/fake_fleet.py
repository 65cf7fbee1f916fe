"""Replicas whose ``/metrics`` pages tell, second by second, of what a simulated server did."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kunserve.core.config import SchedulerConfig
from kunserve_lab.compare.simulated.projection import capacity
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.observer.fleet import with_memory
from kunserve_lab.observer.readings.page import Reading, parse_page
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile, gpu_profile
from kunserve_lab.workload.bursty import burst_arrivals
from kunserve_lab.workload.workload import Lengths, Workload

MODEL = "Qwen/Qwen2.5-14B"
START_S = 1_790_000_000.0
"""Since the epoch: when the fleets below begin."""
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FIRST_S += (20, 40, 80, 160, 640, 2560)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)


@dataclass(frozen=True)
class Counted:
    """Values, and the moment at which each was counted."""

    bounds: tuple[float, ...]
    times_s: np.ndarray
    values: np.ndarray

    def lines(self, name: str, labels: str, now_s: float) -> Iterator[str]:
        seen = self.values[self.times_s <= now_s]
        for bound in self.bounds:
            yield f'{name}_bucket{{le="{float(bound)}",{labels}}} {float((seen <= bound).sum())}'
        yield f'{name}_bucket{{le="+Inf",{labels}}} {float(len(seen))}'
        yield f"{name}_sum{{{labels}}} {float(seen.sum())}"
        yield f"{name}_count{{{labels}}} {float(len(seen))}"


def counted(bounds: Sequence[float], pairs: Sequence[tuple[float, float]]) -> Counted:
    """From (moment, value)."""
    array = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return Counted(tuple(bounds), array[:, 0], array[:, 1])


@dataclass
class FakeReplica:
    """What one simulated server did, as pages of vLLM 0.33."""

    result: SimResult
    profile: InstanceProfile
    model: str = MODEL
    _counted: dict[str, Counted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        done = [one for one in self.result.run.records if one.token_times_s]
        gaps = [(b, b - a) for one in done for a, b in pairwise(one.token_times_s)]
        self._counted = {
            "time_to_first_token_seconds": counted(
                FIRST_S, [(o.token_times_s[0], o.token_times_s[0] - o.sent_s) for o in done]
            ),
            "inter_token_latency_seconds": counted(TOKEN_S, gaps),
            "e2e_request_latency_seconds": counted(
                REQUEST_S, [(one.finish_s, one.finish_s - one.sent_s) for one in done]
            ),
            "request_prompt_tokens": counted(
                LENGTHS, [(one.finish_s, one.input_tokens) for one in done]
            ),
            "request_generation_tokens": counted(
                LENGTHS, [(one.finish_s, one.output_tokens) for one in done]
            ),
        }

    def page(self, now_s: float) -> str:
        """At so many seconds since the run began."""
        labels = f'engine="0",model_name="{self.model}"'
        samples = [one for one in self.result.run.samples if one.time_s <= now_s]
        sample = samples[-1]
        spec = self.profile.spec
        first, gaps = (self._counted[name] for name in
                       ("time_to_first_token_seconds", "inter_token_latency_seconds"))  # fmt: skip
        done = [one for one in self.result.run.records if one.finish_s <= now_s]
        began = [o for o in self.result.run.records if o.token_times_s
                 and o.token_times_s[0] <= now_s]  # fmt: skip
        generated = int((first.times_s <= now_s).sum() + (gaps.times_s <= now_s).sum())
        blocks = spec.kv_units // spec.num_layers
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {sample.num_running}",
            f"vllm:num_requests_waiting{{{labels}}} {sample.num_waiting}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {sample.kv_usage}",
            f'vllm:cache_config_info{{block_size="{spec.block_size}",cache_dtype="auto",'
            f'num_gpu_blocks="{blocks}",engine="0"}} 1.0',
            f"vllm:num_preemptions_total{{{labels}}} {sample.num_preemptions}",
            f'vllm:request_success_total{{finished_reason="length",{labels}}} {len(done)}',
            f'vllm:request_success_total{{finished_reason="abort",{labels}}} 0',
            f"vllm:prompt_tokens_total{{{labels}}} {sum(one.input_tokens for one in began)}",
            f"vllm:generation_tokens_total{{{labels}}} {generated}",
            "some_other_metric 7",
        ]
        for name, one in self._counted.items():
            lines += one.lines(f"vllm:{name}", labels, now_s)
        return "\n".join(lines) + "\n"

    @property
    def end_s(self) -> float:
        """When it was done."""
        return self.result.run.duration_s


@dataclass(frozen=True)
class FakeFleet:
    """Replicas behind a round robin, and the scenario that they went through."""

    scenario: Scenario
    replicas: tuple[FakeReplica, ...]

    def readings(self, now_s: float) -> list[Reading]:
        """At so many seconds since the run began."""
        return [
            reading
            for at, replica in enumerate(self.replicas)
            for reading in parse_page(replica.page(now_s), f"10.0.0.{at}:8000", START_S + now_s)
        ]

    @property
    def num_seconds(self) -> int:
        """Until all is done, and quiet for a while."""
        return int(max(one.end_s for one in self.replicas)) + 15


def fleet(
    height: float,
    *,
    num: int = 2,
    blocks: int = 900,
    tokens: tuple[int, int] = (1000, 150),
    burst_s: float = 15.0,
) -> FakeFleet:
    """Replicas on an A800 each, under a burst of ``height`` times what their memory sustains."""
    profile = gpu_profile(find_model(MODEL), find_device("a800"), block_size=16)
    profile = with_memory(profile, blocks)
    lengths = _lengths(*tokens, 4000)
    able = capacity(_scenario(profile, num, Workload((0.0,) * len(lengths), lengths, "once")))
    full = able.full_rate * num
    arrivals = burst_arrivals(0.5 * full, height * full, 15.0, burst_s, 10.0, 1)
    scenario = _scenario(
        profile, num, Workload(arrivals, lengths.take(len(arrivals)), "Poisson with a burst")
    )
    return FakeFleet(scenario, tuple(_alone(scenario, at) for at in range(num)))


def _alone(scenario: Scenario, place: int) -> FakeReplica:
    """Every ``num_instances``-th request: a round robin."""
    work, num = scenario.workload, scenario.num_instances
    own = Workload(
        work.arrival_s[place::num],
        Lengths(work.input_tokens[place::num], work.output_tokens[place::num], "its part"),
        "its part",
    )
    result = simulate(SYSTEMS["recompute"], replace(scenario, num_instances=1, workload=own))
    return FakeReplica(result, scenario.profile)


def _scenario(profile: InstanceProfile, num: int, workload: Workload) -> Scenario:
    return Scenario(profile, num, workload, SchedulerConfig(256, 2048))


def _lengths(inputs: int, outputs: int, number: int) -> Lengths:
    rng = np.random.default_rng(3)
    draw = np.clip(rng.lognormal(0.0, 0.4, (2, number)), 0.3, 3.0)
    pair = np.maximum(2, (draw.T * (inputs, outputs)).astype(int))
    return Lengths(tuple(pair[:, 0].tolist()), tuple(pair[:, 1].tolist()), "lognormal")
