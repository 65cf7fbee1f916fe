"""What `kunserve observe` foretells of a burst, beside the same burst on servers that drop.

    python -m benchmarks.serving.observe_truth [--load 0.12] [--rounds 1]
    python -m benchmarks.serving.observe_truth --peers DIR --dtype float32 --load 0.06 --end 140

Two servers that do not drop get the first spike of the Azure window in turn, and the observer
watches them. Then the same requests go to one server of two instances that drops. Each way stands
there as foretold (simulated from what the observer counted) and as measured at the client, over the
requests of the episode. With DIR the two servers are vLLM's CPU build (``DIR/vllm``,
``DIR/smollm2-135m-hf``), and the one that drops computes with its model classes (``--engine
vllm``): that environment has kunserve too, or finds it by PYTHONPATH. Without DIR all are ours. The
second line is for a processor without AVX-512, because vLLM has no fast bfloat16 there; it takes
ten minutes.

Wants a quiet machine: step times are fitted to the fleet before the burst's figures are simulated,
but a client that waits for a core is in no model.
"""

import argparse
import asyncio
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.paper.kept_tables.real import MAY_MISS
from benchmarks.report import Report
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import tpot_s, ttft_s
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.compare.others import OtherServers, running_others
from kunserve_lab.compare.settings import WorkloadSettings, workload_of
from kunserve_lab.observer.episodes.episode import CALM_S
from kunserve_lab.observer.episodes.story import comparison, sentence
from kunserve_lab.observer.episodes.what_if import AS_IT_RAN, DROP, LEAST_LOAD, Judged
from kunserve_lab.observer.run import Observer
from kunserve_lab.observer.settings import Made, Settings
from kunserve_lab.workload.workload import Workload

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "benchmarks" / "results" / "profile-smollm2-135m.json"
MODEL = "smollm2-135m"
STEP_TOKENS, SEQS = 256, 256
KV_TOKENS = 3840
"""Of a replica of vLLM; our own hold about as many beside the weights in --instance-memory."""
VLLM_BLOCK = 32
LENGTH_SCALE = 0.5
"""Of BurstGPT's lengths, of which the longest would not fit into a replica."""


@dataclass(frozen=True)
class Measured:
    """A run: its requests, and when it began, in seconds since the epoch."""

    records: tuple[RequestRecord, ...]
    began_s: float


class Quiet:
    """Implements ``Shower``: tells episodes only."""

    def show(self, view: object, errors: Mapping[str, str]) -> None:
        """Nothing."""

    def tell(self, judged: Judged) -> None:
        """The sentence, on stderr."""
        say(f"  {sentence(judged)}.")
        for line in comparison(judged):
            say(f"    {line}")

    def close(self) -> None:
        """Nothing."""


def main() -> None:
    """Print what was foretold beside what was measured."""
    options = parse()
    settings = WorkloadSettings(
        trace=Path("azure-2023-merged-640s"),
        lengths=Path("burstgpt-like"),
        start_s=options.start,
        end_s=options.end,
        length_scale=LENGTH_SCALE,
    )
    kind = fleet_of(options)[0]
    fleet = "our own servers" if options.peers is None else "vLLM's servers"
    conditions = {"fleet": fleet, "load": options.load, "kind": kind, "dtype": options.dtype}
    with Report("observe_truth", **conditions) as report:
        for number in range(options.rounds):
            workload = workload_of(settings, options.load, seed=number)
            say(f"round {number + 1}: {len(workload)} requests in {workload.duration_s:.0f} s")
            one_round(report, options, workload, number)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="with vLLM; none: ours only")
    parser.add_argument("--load", type=float, default=0.12, help="share of the trace's requests")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--end", type=float, default=220.0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--instance-mib", type=int, default=343,
        help="of one of ours, in bfloat16; in float32 it has twice as much",
    )  # fmt: skip
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--record", type=Path, help="keep the observer's readings")
    parser.add_argument("--report", type=Path, help="keep the observer's page")
    return parser.parse_args()


def one_round(report: Report, options: argparse.Namespace, workload: Workload, number: int) -> None:
    """The burst on servers that do not drop, with the observer; then on one that does."""
    kind, fleet = fleet_of(options)
    with running_others(kind, fleet) as urls:
        judged, alone = asyncio.run(watched(urls, options, workload, number))
    if not judged or AS_IT_RAN not in max(judged, key=size).outcomes:
        say("no episode was seen, or none could be simulated: give another --load")
        return
    greatest = max(judged, key=size)
    with running_others("kunserve-drop", dropping(options)) as urls:
        dropped = asyncio.run(replayed(urls, workload, number))
    begin_s = greatest.episode.begin_s - alone.began_s
    end_s = greatest.episode.end_s - alone.began_s
    for way, run in ((AS_IT_RAN, alone), (DROP, dropped)):
        during = [one for one in run.records if begin_s <= one.sent_s <= end_s]
        foretold = greatest.outcomes[way]
        for name, predicted, values in (
            ("P50 TTFT", foretold.ttft_p50_s, percentile(map(ttft_s, during), 50)),
            ("P99 TTFT", foretold.ttft_p99_s, percentile(map(ttft_s, during), 99)),
            ("P50 TPOT", foretold.tpot_p50_s, percentile(map(tpot_s, during), 50)),
        ):
            add = functools.partial(report.add, round=number, requests=len(during))
            add(f"{way}, {name}, foretold", predicted, "s")
            add(f"{way}, {name}, measured", values, "s")
            off = abs(predicted - values) / values if values > 0 else math.nan
            add(f"{way}, {name}, missed by (target {MAY_MISS:g})", off, "share")
    least = greatest.outcomes[LEAST_LOAD].ttft_p99_s
    report.add(f"{LEAST_LOAD}, P99 TTFT, foretold", least, "s", round=number)


async def watched(
    urls: Sequence[str], options: argparse.Namespace, workload: Workload, seed: int
) -> tuple[list[Judged], Measured]:
    """The requests in turn to these servers, and what the observer made of it."""
    stop = asyncio.Event()
    made = Made(MODEL, profile=options.profile, max_num_seqs=SEQS,
                max_num_batched_tokens=STEP_TOKENS)  # fmt: skip
    settings = Settings(
        made, tuple(urls), record=options.record, report=options.report, as_json=True
    )  # standard output is for figures
    observer = Observer(settings, Quiet())
    watching = asyncio.create_task(observer.watch(stop))
    try:
        run = await replayed(urls, workload, seed)
        await asyncio.sleep(CALM_S + 5.0)
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return observer.judged, run


async def replayed(urls: Sequence[str], workload: Workload, seed: int) -> Measured:
    """The requests in turn."""
    model = await find_model(urls, None, None, 60.0)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=1200.0
    )
    warmed = Target(tuple(urls), settings, (), num_warmups=2 * len(urls))
    first = Workload((0.0,), workload.lengths.take(1), "the first alone")
    await measure(warmed, first, TokenIdPrompts(1_000_000 + seed))
    began_s = time.time()
    outcome = await measure(Target(tuple(urls), settings, ()), workload, TokenIdPrompts(seed))
    return Measured(outcome.records, began_s)


def fleet_of(options: argparse.Namespace) -> tuple[str, OtherServers]:
    """Two servers that do not drop: vLLM where it is, else ours."""
    if options.peers is None:
        return "kunserve-recompute", our_server(options, "recompute", 1, replicas=2)
    root = options.peers.resolve()
    command = (
        f"{root}/vllm/bin/python -m vllm.entrypoints.openai.api_server "
        f"--model {root}/smollm2-135m-hf --host 127.0.0.1 --port {{port}} --dtype {options.dtype} "
        f"--max-model-len 3072 --served-model-name {MODEL} "
        f"--block-size {VLLM_BLOCK} --num-gpu-blocks-override {KV_TOKENS // VLLM_BLOCK} "
        f"--max-num-seqs {SEQS} --max-num-batched-tokens {STEP_TOKENS}"
    )
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "{replica}", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "HF_HUB_OFFLINE": "1"}  # fmt: skip
    return "vllm", OtherServers(command=command, replicas=2, environment=environment)


def dropping(options: argparse.Namespace) -> OtherServers:
    """One server of two instances, of the same kernels as the two."""
    if options.peers is None:
        return our_server(options, "drop", 2)
    root = options.peers.resolve()
    command = (
        f"{root}/vllm/bin/python -m kunserve.cli serve {root}/smollm2-135m-hf --engine vllm "
        f"--served-model-name {MODEL} {shared_flags(options, 'drop', 2)}"
    )
    found = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return OtherServers(command=command, environment=found)


def our_server(
    options: argparse.Namespace, policy: str, num_instances: int, replicas: int = 1
) -> OtherServers:
    """``kunserve serve`` with plain weights; private ones, because shared ones leave no drop."""
    flags = f"{shared_flags(options, policy, num_instances)} --quantization none --weights private"
    command = f"{sys.executable} -m kunserve.cli serve {MODEL} {flags}"
    return OtherServers(command=command, replicas=replicas)


def shared_flags(options: argparse.Namespace, policy: str, num_instances: int) -> str:
    """Of a server of ours, whichever engine it has."""
    mib = options.instance_mib * (2 if options.dtype == "float32" else 1)
    return (
        f"--port {{port}} --num-instances {num_instances} --instance-memory {mib}MiB "
        f"--max-num-batched-tokens {STEP_TOKENS} --max-num-seqs {SEQS} --num-threads 1 "
        f"--dtype {options.dtype} --overload-policy {policy}"
    )


def size(judged: Judged) -> int:
    """Requests that came during the episode."""
    return judged.measured.num_arrived


def percentile(values: "map[float | None]", percent: float) -> float:
    """Of those that are known; NaN of none."""
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else math.nan


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
