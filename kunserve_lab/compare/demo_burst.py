"""Which burst the demo sends: it overflows this machine's memory, and nearly fits after a drop.

How fast steps are decides that, and it differs by a factor of eight among processors. So a few
requests are timed, and the simulator runs candidates with step times of that pace.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.server.start.flags.option import ByteSize
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import tpot_s, ttft_s
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.session import Target, measure
from kunserve_lab.compare.experiment import Place
from kunserve_lab.compare.settings import RealSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.jobs import Job
from kunserve_lab.compare.simulated.projection import capacity
from kunserve_lab.compare.simulated.runner import run_simulated
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.sim.costs import LOOP_S, MeasuredTimes, cpu_profile, profile_times
from kunserve_lab.sim.models import find_model
from kunserve_lab.workload.workload import Lengths, Workload

SERVING = CostCoefficients(
    attention_s=3.32e-7,
    token_s=5.24e-4,
    chunk_s=7.10e-3,
    shared_s=7.07e-3,
    context_s=1.205e-6,
    sample_s=1.50e-4,
    narrow_s=4.12e-3,
)
"""Of SmolLM2 on one core of an AMD EPYC with AVX-512, while the other one computes: paces are
multiples of it. `benchmarks/results/profile-smollm2-135m.json`, as is the next."""
ALONE = CostCoefficients(
    attention_s=3.17e-7,
    token_s=5.04e-4,
    chunk_s=6.83e-3,
    shared_s=6.83e-3,
    context_s=1.054e-6,
    sample_s=1.59e-4,
    narrow_s=3.01e-3,
)
BLOCK_SIZE = 16
NUM_LENGTHS = 1024
"""Requests whose lengths stand for all."""
PROMPT_TOKENS, NUM_PROMPTS = 512, 8
"""Prompts that are timed, all at once."""
SHORT_TOKENS, ANSWER_TOKENS, NUM_ANSWERS = 16, 33, 16
"""Answers that are timed, all at once."""
MIB = 1 << 20
LEAST_PACE, MOST_PACE = 0.02, 50.0
LEAST_RATE = 0.55
"""Requests per second below which a minute has too few: shorter ones are sent, to less memory."""
LEAST_LENGTHS = 1 / 8
HEIGHTS = (0.85, 1.0, 0.7, 1.2)
"""Mean rates that are tried in this order, in X: what full memory sustains."""
SLOWER = (1.0, 1.25)
"""Step times that each is tried with: a machine's next minute may be slower, and a pair's steps are
up to so much longer than the simulator has them."""
ENOUGH, VISIBLE_S = 2.0, 4.0
"""Times shorter that a wait must become, at all of them, to stop trying; and the wait before."""
SEARCH_S = 12.0
"""No further candidate is begun after so long."""
MOST_WINDOWS = 3.1
"""Both runs together, in windows, at the pace that was measured: the demo takes four minutes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long this machine's steps are, in multiples of `SERVING`."""

    prompts: float
    """What grows with the tokens of a prompt."""
    decodes: float
    """Reading weights and KV."""

    def times(self, cost: CostCoefficients) -> CostCoefficients:
        """Those of this machine."""
        return replace(
            cost,
            attention_s=cost.attention_s * self.prompts,
            token_s=cost.token_s * self.prompts,
            chunk_s=cost.chunk_s * self.decodes,
            shared_s=cost.shared_s * self.decodes,
            context_s=cost.context_s * self.decodes,
            sample_s=cost.sample_s * self.decodes,
            narrow_s=cost.narrow_s * self.decodes,
        )

    def slower(self, factor: float) -> "Pace":
        """So many times."""
        return Pace(self.prompts * factor, self.decodes * factor)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the simulator says of a burst."""

    waits_s: tuple[float, float]
    """P90 TTFT under `recompute` and `drop`."""
    runs_s: float
    """Both runs."""

    @property
    def gain(self) -> float:
        """Times shorter."""
        return self.waits_s[0] / self.waits_s[1]


@dataclass(frozen=True, slots=True)
class Burst:
    """What the demo sends, and to how much memory."""

    setup: RealSetup
    workload: WorkloadSettings
    height: float
    """In X."""
    expected: tuple[Expected, ...]
    """At each of `SLOWER`."""

    @property
    def is_good(self) -> bool:
        """Whether no other one need be tried."""
        visible = self.expected[0].waits_s[0] >= VISIBLE_S
        return self.fits and visible and self.worst >= ENOUGH

    @property
    def worst(self) -> float:
        """The least that drops shorten the wait."""
        return min(one.gain for one in self.expected)

    @property
    def fits(self) -> bool:
        """Whether the demo is over in time."""
        return self.expected[0].runs_s <= MOST_WINDOWS * self.workload.duration_s

    def reason(self, pace: Pace) -> str:
        """Why this burst, in a line."""
        rival_s, ours_s = self.expected[0].waits_s
        lengths = self.workload.length_scale
        shorter = "" if lengths == 1.0 else f", lengths and KV memory x{lengths:g}"
        return (
            f"{self.workload.rate:g} requests/s{shorter}, because steps take {pace.prompts:.1f} "
            f"(prompts) and {pace.decodes:.1f} times (decodes) as long here as on a Zen 4 core. "
            f"Expected: one request in ten waits {rival_s:.0f} s with recompute, {ours_s:.0f} s "
            f"with drop, after {self.expected[0].runs_s / 60:.1f} minutes"
        )


def measure_pace(url: str, setup: RealSetup) -> Pace:
    """Time prompts, then answers, of all instances of the server at once."""
    settings = CallSettings(
        model=setup.model,
        endpoint="/v1/completions",
        chat=False,
        ignore_eos=True,
        timeout_s=setup.timeout_s,
    )
    target = Target((url,), settings, (), num_warmups=setup.num_instances)
    prompts = _at_once(NUM_PROMPTS, PROMPT_TOKENS, 1)
    answers = _at_once(NUM_ANSWERS, SHORT_TOKENS, ANSWER_TOKENS)
    first, second = (
        asyncio.run(measure(target, one, TokenIdPrompts(seed))).records
        for seed, one in enumerate((prompts, answers))
    )
    return pace_of(first, second, setup)


def _at_once(count: int, num_input: int, num_output: int) -> Workload:
    lengths = Lengths((num_input,) * count, (num_output,) * count, "timed")
    return Workload((0.0,) * count, lengths, "all at once")


def pace_of(
    prompts: Sequence[RequestRecord], answers: Sequence[RequestRecord], setup: RealSetup
) -> Pace:
    """The pace at which these records are what they are. Raises ConfigError if one failed."""
    waits = [ttft_s(one) for one in prompts if one.succeeded]
    gaps = [tpot_s(one) for one in answers if one.succeeded]
    known, steps = [s for s in waits if s is not None], [s for s in gaps if s is not None]
    if len(known) < len(prompts) or len(steps) < len(answers):
        raise ConfigError("the server did not answer what was to be timed")
    return solve(max(known) / (NUM_PROMPTS / setup.num_instances), median(steps), setup)


def solve(prompt_s: float, decode_s: float, setup: RealSetup) -> Pace:
    """From the seconds of a prompt of `PROMPT_TOKENS`, and of a step of an instance's answers.

    Both are sums of a part of each pace and of what a step takes anyway.
    """
    least = min(setup.max_num_batched_tokens, PROMPT_TOKENS)
    chunks = [_chunk(start, least) for start in range(0, PROMPT_TOKENS, least)]
    context = SHORT_TOKENS + ANSWER_TOKENS // 2
    decodes = [_chunk(context, 1)] * (NUM_ANSWERS // setup.num_instances)
    layers = find_model(setup.model).num_layers
    rows = []
    for steps in ([[chunk] for chunk in chunks], [decodes]):
        at, more_prompts, more_decodes = (
            sum(_times(pace, layers).stage_s(step, layers, True) for step in steps)
            for pace in (Pace(1, 1), Pace(2, 1), Pace(1, 2))
        )
        by_prompts, by_decodes = more_prompts - at, more_decodes - at
        rows.append((by_prompts, by_decodes, at - by_prompts - by_decodes))
    (a, b, free), (c, d, free_of_decode) = rows
    x, y = prompt_s - free, decode_s - free_of_decode
    found = ((x * d - b * y) / (a * d - b * c), (a * y - x * c) / (a * d - b * c))
    return Pace(*(min(MOST_PACE, max(LEAST_PACE, value)) for value in found))


def _chunk(start: int, count: int) -> Chunk:
    return Chunk(RequestId("timed"), start, count, 1)


def _times(pace: Pace, num_layers: int) -> MeasuredTimes:
    return MeasuredTimes(pace.times(SERVING), num_layers, LOOP_S)


def choose(
    pace: Pace,
    setup: RealSetup,
    workload: WorkloadSettings,
    seed: int,
    is_sized: bool = True,
    now: Callable[[], float] = time.monotonic,
) -> Burst:
    """The first candidate that is good, or the best of those that there is time to try.

    Without ``is_sized`` lengths and memory stay as they are.
    """
    began_s = now()
    tried: list[Burst] = []
    for burst in _candidates(pace, setup, workload, seed, is_sized):
        tried.append(replace(burst, expected=_expected(burst, pace, seed)))
        if tried[-1].is_good or now() - began_s > SEARCH_S:
            break
    return max(tried, key=lambda one: (one.fits, one.worst))


def _candidates(
    pace: Pace, setup: RealSetup, workload: WorkloadSettings, seed: int, is_sized: bool
) -> Iterator[Burst]:
    sized, lengths = (setup, workload), 1.0
    full_rate = _full_rate(pace, *sized, seed)
    while is_sized and full_rate < LEAST_RATE and lengths > LEAST_LENGTHS:
        lengths /= 2
        sized = _shorter(setup, workload, lengths)
        full_rate = _full_rate(pace, *sized, seed)
    for height in HEIGHTS:
        rate = float(f"{height * full_rate:.3g}")
        yield Burst(sized[0], replace(sized[1], rate=rate), height, ())


def _shorter(
    setup: RealSetup, workload: WorkloadSettings, lengths: float
) -> tuple[RealSetup, WorkloadSettings]:
    """Requests of so much of their lengths, and KV memory for as many of them."""
    weights = math.ceil(find_model(setup.model).weights_bytes / MIB)
    kv_mib = (memory_bytes(setup) // MIB - weights) * lengths
    return (
        replace(setup, instance_memory=f"{weights + math.ceil(kv_mib)}MiB"),
        replace(workload, length_scale=lengths),
    )


def memory_bytes(setup: RealSetup) -> int:
    """Of an instance."""
    return int(ByteSize().convert(setup.instance_memory, None, None))


def _full_rate(pace: Pace, setup: RealSetup, workload: WorkloadSettings, seed: int) -> float:
    """X. Of many lengths, whatever this window draws of them."""
    many = replace(workload, rate=NUM_LENGTHS / workload.duration_s)
    return capacity(_scenario(pace, setup, many, seed)).full_rate * setup.num_instances


def _scenario(pace: Pace, setup: RealSetup, workload: WorkloadSettings, seed: int) -> Scenario:
    model = find_model(setup.model)
    costs = pace.times(SERVING), pace.times(ALONE)
    profile = cpu_profile(model, *costs, BLOCK_SIZE, memory_bytes(setup))
    return Scenario(
        profile=profile,
        num_instances=setup.num_instances,
        workload=workload_of(workload, 1.0, seed),
        scheduler=SchedulerConfig(max_num_batched_tokens=setup.max_num_batched_tokens),
        cost=profile_times(profile.times, model.num_layers, setup.max_num_batched_tokens),
    )


def _expected(burst: Burst, pace: Pace, seed: int) -> tuple[Expected, ...]:
    """Simulated at each of `SLOWER`, side by side."""
    names = ("recompute", "drop")
    jobs = [
        Job(Place(slower, seed, 0, name), SYSTEMS[name], scenario)
        for slower in SLOWER
        for scenario in [_scenario(pace.slower(slower), burst.setup, burst.workload, seed)]
        for name in names
    ]
    by_place = {one.result.place: one.result for one in run_simulated(jobs, None)}
    found = []
    for slower in SLOWER:
        runs = [by_place[Place(slower, seed, 0, name)] for name in names]
        rival_s, ours_s = (run.percentile_s("ttft", 90.0) for run in runs)
        found.append(Expected((rival_s, ours_s), sum(run.duration_s for run in runs)))
    return tuple(found)
