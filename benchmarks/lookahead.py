"""Batch formation by tokens against lookahead: `python -m benchmarks.lookahead --profile P.json`.

1. How long forming all queued requests takes, and how equal the microbatches are.
2. Bubbles of pipelines of two and four stages over queues of long and of chat prompts. The real
   scheduler forms the batches; the stages are a clock. A stage takes the time that the profile's
   cost model says of its layers, whole ones, and the last that of the output head too, times one
   of the held-out residuals of the microbatch's region, so that formation does not balance by the
   very numbers that time it. Two cores cannot run four stages honestly.
"""

import argparse
import csv
import gzip
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.model.profile import Profile, read_profile
from kunserve.policy.batch_form import FormationView, PromptWork
from kunserve.policy.cost_fit import predict_held_out
from kunserve.policy.lookahead import Lookahead, form_all, form_lookahead
from kunserve.sim.costs import MeasuredTimes

BLOCK = 16
MAX_LEN = 8192
HOP_S = 0.001
STAGE_LAYERS = {2: (15, 15), 4: (7, 8, 8, 7)}
"""What drops make of that many whole instances of SmolLM2-135M."""
DROPPED_KV_TOKENS = {2: 78_000, 4: 156_000}
"""Of a group of that many stages, with the freed weights."""

Lengths = list[tuple[int, int]]


def lengths_of(kind: str, path: Path | None, count: int, seed: int) -> Lengths:
    """(input, output) tokens: from a file with such columns, else drawn like the published means.

    LongBench (multi-news, gov-report): 5.9K in, 513 out. ShareGPT: skewed, about 320 in, 210 out.
    """
    generator = np.random.default_rng(seed)
    if path is not None:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        table = csv.DictReader(text.splitlines())
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in table]
        pairs = [rows[i] for i in generator.choice(len(rows), count)]
    elif kind == "longbench":
        pairs = _lognormal(generator, count, (5900, 0.6), (513, 0.4))
    else:
        pairs = _lognormal(generator, count, (320, 1.3), (210, 0.9))
    # Outputs are cut to keep prompts whole within what the model can hold.
    return [(min(max(a, 4), 7000), min(max(b, 2), MAX_LEN - 7001)) for a, b in pairs]


def _lognormal(
    generator: np.random.Generator, count: int, *columns: tuple[float, float]
) -> Lengths:
    drawn = [
        generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, count) for mean, sigma in columns
    ]
    return [(int(a), int(b)) for a, b in zip(*drawn, strict=True)]


@dataclass(slots=True)
class Account:
    """What a pipeline did."""

    busy_s: list[float]
    queue_busy_s: list[float]
    """Until the last prompt token was planned: while there was a queue to look ahead over."""
    queue_s: float = 0.0
    end_s: float = 0.0
    queue_tokens: int = 0
    tpot_s: list[float] = field(default_factory=list)

    def bubbles(self) -> tuple[float, float, float]:
        """Idle share of stage time: while prompts were queued, then of its busiest stage alone
        (what the uneven layers and the output head leave no part of), and over the whole run.
        """
        stages = len(self.busy_s)
        queued = 1 - sum(self.queue_busy_s) / (stages * self.queue_s)
        busiest = 1 - max(self.queue_busy_s) / self.queue_s
        return queued, busiest, 1 - sum(self.busy_s) / (stages * self.end_s)


class Truth:
    """How long a microbatch really takes: the model's prediction times one of its own errors.

    ``layers`` are those of each stage.
    """

    def __init__(self, profile: Profile, layers: Sequence[int], seed: int) -> None:
        self._times = MeasuredTimes(profile.coefficients, profile.subject.num_layers)
        self._layers = layers
        measured = np.array([sample.seconds for sample in profile.samples])
        errors = measured / predict_held_out(profile.samples)
        regions = np.array([sample.region for sample in profile.samples])
        self._errors = {region: errors[regions == region] for region in set(regions.tolist())}
        self._generator = np.random.default_rng(seed)

    def stage_seconds(self, plan: StepPlan) -> list[float]:
        """Of each stage."""
        if not plan.chunks:
            return [0.0] * len(self._layers)
        error = float(self._generator.choice(self._errors[_region_of(plan)]))
        last = len(self._layers) - 1
        return [
            error * self._times.stage_s(plan.chunks, num_layers, stage == last)
            for stage, num_layers in enumerate(self._layers)
        ]


def _region_of(plan: StepPlan) -> str:
    """The region of a profile that a plan's batch belongs to."""
    decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
    if decodes == len(plan.chunks):
        return "decode"
    if decodes:
        return "mixed"
    return "prefix" if any(chunk.start for chunk in plan.chunks) else "prefill"


def run_pipeline(
    lengths: Lengths, num_stages: int, config: SchedulerConfig, truth: Truth
) -> Account:
    """All requests queued at time 0, run to the end."""
    scheduler = Scheduler(
        config, GroupId(0), num_stages, BLOCK, DROPPED_KV_TOKENS[num_stages] // BLOCK,
        frozenset(), MAX_LEN,
    )  # fmt: skip
    for i, (prompt, output) in enumerate(lengths):
        sampling = SamplingParams(output, ignore_eos=True)
        scheduler.add(Request(RequestId(str(i)), (1,) * prompt, sampling, float(i)))
    account = Account([0.0] * num_stages, [0.0] * num_stages)
    free = [0.0] * num_stages
    flights: deque[tuple[float, StepPlan]] = deque()
    first_s: dict[str, float] = {}
    while scheduler.has_work:
        while flights and flights[0][0] <= free[0]:
            _land(scheduler, flights, first_s, account)
        plan = scheduler.schedule(free[0])
        if plan is None:
            free[0] = max(free[0], flights[0][0])
            _land(scheduler, flights, first_s, account)
            continue
        arrived = free[0]
        for stage, seconds in enumerate(truth.stage_seconds(plan)):
            began = max(free[stage], arrived)
            free[stage] = began + seconds
            arrived = free[stage] + HOP_S
            account.busy_s[stage] += seconds
        flights.append((arrived, plan))
        if scheduler.load(1, 0, 0.0).waiting_tokens:
            account.queue_busy_s = account.busy_s.copy()
            account.queue_s = max(free)
            account.queue_tokens += plan.num_tokens
    account.end_s = max(free)
    return account


def _land(
    scheduler: Scheduler,
    flights: deque[tuple[float, StepPlan]],
    first_s: dict[str, float],
    account: Account,
) -> None:
    now_s, plan = flights.popleft()
    tokens = tuple(SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples)
    for output in scheduler.complete(StepResult(plan.group_id, plan.step_id, tokens), now_s):
        began_s = first_s.setdefault(output.request_id, now_s)
        if output.finish_reason is not None and output.position:
            account.tpot_s.append((now_s - began_s) / output.position)


def compare(
    kind: str, lengths: Lengths, num_stages: int, profile: Profile, num_tokens: int, seed: int
) -> None:
    """Print one line of JSON for token count and one for lookahead, and their ratio."""
    rates = []
    for lookahead in (False, True):
        config = SchedulerConfig(
            max_num_batched_tokens=num_tokens, lookahead=lookahead, cost=profile.coefficients
        )
        truth = Truth(profile, STAGE_LAYERS[num_stages], seed)
        account = run_pipeline(lengths, num_stages, config, truth)
        queued, busiest, whole = account.bubbles()
        rates.append((account.queue_tokens / account.queue_s, 1 / account.end_s))
        tpot = statistics.quantiles(account.tpot_s, n=100)
        line = {
            "queue": kind,
            "stages": num_stages,
            "formation": "lookahead" if lookahead else "tokens",
            "bubbles_queued": round(queued, 4),
            "bubbles_busiest_stage": round(busiest, 4),
            "bubbles_whole_run": round(whole, 4),
            "tokens_per_s_queued": round(rates[-1][0], 1),
            "makespan_s": round(account.end_s, 1),
            "tpot_p50_ms": round(tpot[49] * 1e3, 1),
            "tpot_p99_ms": round(tpot[98] * 1e3, 1),
        }
        print(json.dumps(line), flush=True)
    gains = {
        "throughput_gain_queued": round(rates[1][0] / rates[0][0] - 1, 4),
        "throughput_gain_whole_run": round(rates[1][1] / rates[0][1] - 1, 4),
    }
    print(json.dumps({"queue": kind, "stages": num_stages} | gains), flush=True)


def time_formation(cost: CostCoefficients, repeats: int = 15) -> None:
    """Print what forming everything queued takes (target: 2 ms for 1,000, 20 ms for 10,000)."""
    generator = np.random.default_rng(0)
    for num_queued in (1_000, 10_000):
        for kind, middle in (("chat", 300), ("long", 6000)):
            drawn = generator.lognormal(np.log(middle), 0.8, num_queued).astype(int) + 2
            tokens = np.minimum(drawn, MAX_LEN)
            view = FormationView(
                [800] * 128, [PromptWork(0, int(n)) for n in tokens], 64, 1, 4, 512, 256, 50_000
            )
            how, seconds = Lookahead(cost, 64), []
            for _ in range(repeats):
                began = time.perf_counter()
                form_lookahead(view, None, how)
                seconds.append(time.perf_counter() - began)
            formation = form_all(view, how)
            line = {
                "queued": num_queued,
                "prompts": kind,
                "microbatches": formation.num_microbatches,
                "median_ms": round(statistics.median(seconds) * 1e3, 3),
                "best_ms": round(min(seconds) * 1e3, 3),
                "imbalance": round(formation.imbalance, 4),
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    """Formation first, then every pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--longbench", type=Path, help="CSV with input_tokens and output_tokens")
    parser.add_argument("--sharegpt", type=Path, help="the same; .gz too")
    parser.add_argument("--num-long", type=int, default=60)
    parser.add_argument("--num-chat", type=int, default=600)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    profile = read_profile(args.profile)
    time_formation(profile.coefficients)
    for kind, path, count in (
        ("longbench", args.longbench, args.num_long),
        ("sharegpt", args.sharegpt, args.num_chat),
    ):
        lengths = lengths_of(kind, path, count, args.seed)
        for num_stages in (2, 4):
            compare(kind, lengths, num_stages, profile, args.max_num_batched_tokens, args.seed)


if __name__ == "__main__":
    main()
