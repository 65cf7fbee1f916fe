"""How long decisions take: a drop plan for many instances, microbatches, placing, one dispatch.

    python -m benchmarks.brain.decisions [--instances 128]

Best of several runs on this machine, of Algorithm 1 (`plan_drop`), of lookahead
(`form_lookahead`) and of dispatch (`choose_group`). What knowing prefixes adds to one request is
naming its beginning, once, and finding it among what 64 groups have. Targets: a plan for 128
instances in 5 ms; 1,000 queued requests in 2 ms, 10,000 in 20 ms. The imbalance of a formation is
its costliest microbatch over the mean.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.report import Report, Setting
from kunserve.control.cluster.requests.prefixes import NAMED_TOKENS, PrefixIndex
from kunserve.core.config.cluster import MAX_INSTANCES
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.core.prefix import prefix_hashes
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.tokens import TokenIds
from kunserve.policy.batch.batch_form import FormationView, PromptWork
from kunserve.policy.batch.lookahead import Lookahead, form_all, form_lookahead
from kunserve.policy.dispatch.choice import choose_group
from kunserve.policy.drop.plan import DropPlan, Standing, Wanted, plan_drop
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile

NUM_LAYERS = 30
REPEATS = 5
MAX_PROMPT_TOKENS = 8192

_T = TypeVar("_T")


def make_spec(instance: int, kv_units: int) -> InstanceSpec:
    """SmolLM2-135M in bfloat16, blocks of 16 tokens."""
    layer_bytes, unit_bytes, granule_bytes = 7_080_192, 12_288, 256 * 1024
    memory_bytes = NUM_LAYERS * layer_bytes + kv_units * unit_bytes
    return InstanceSpec(
        InstanceId(instance),
        NUM_LAYERS,
        16,
        unit_bytes,
        layer_bytes,
        memory_bytes,
        kv_units,
        granule_bytes,
    )


def plans(num_instances: int, num_budgets: int) -> dict[str, Callable[[], DropPlan]]:
    """Named requirements on a cluster of undropped instances."""
    specs = {
        InstanceId(i): make_spec(i, 20_000 + 40 * (i % num_budgets)) for i in range(num_instances)
    }
    layouts = [GroupLayout(GroupId(i), (Stage(i, LayerRange(0, NUM_LAYERS)),)) for i in specs]
    standing = Standing(layouts, specs, GroupId(num_instances))
    return {
        name: partial(plan_drop, standing, Wanted(required))
        for name, required in (
            ("one merge", 1),
            ("every instance paired", 287 * num_instances),
            ("all that can be dropped", 1 << 60),
        )
    }


def best_ms(call: Callable[[], _T]) -> tuple[float, _T]:
    """The least wall time of ``REPEATS`` calls, and what the last one gave."""
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        found = call()
        times.append((time.perf_counter() - start_s) * 1e3)
    return min(times), found


def time_plans(report: Report, num_instances: int) -> None:
    """Clusters whose instances have 1, 4 and 64 different sizes of memory."""
    for num_budgets in (1, 4, 64):
        for name, call in plans(num_instances, num_budgets).items():
            spent_ms, plan = best_ms(call)
            case: dict[str, Setting] = {
                "decision": "drop plan",
                "instances": num_instances,
                "budgets": num_budgets,
            }
            report.add("time", spent_ms, "ms", **case, needed=name)
            report.add("groups", len(plan.merges), "", **case, needed=name)


def time_formations(report: Report) -> None:
    """Queues of chat and of long prompts before a pipeline of two."""
    profile = gpu_profile(find_model("Qwen/Qwen2.5-14B"), find_device("a800"))
    cost = profile_times(profile.times, profile.spec.num_layers, 2048)
    generator = np.random.default_rng(0)
    for num_queued in (1_000, 10_000):
        for kind, median_tokens in (("chat", 300), ("long", 6000)):
            drawn = generator.lognormal(np.log(median_tokens), 0.8, num_queued).astype(int) + 2
            prompts = [PromptWork(0, int(n)) for n in np.minimum(drawn, MAX_PROMPT_TOKENS)]
            view = FormationView([800] * 128, prompts, 64, 1, 4, 512, 256, 50_000)
            how = Lookahead(cost, 64)
            spent_ms, _ = best_ms(lambda v=view, h=how: form_lookahead(v, None, h))  # type: ignore[misc]
            case: dict[str, Setting] = {
                "decision": "formation",
                "queued": num_queued,
                "prompts": kind,
            }
            report.add("time", spent_ms, "ms", **case)
            report.add("imbalance", form_all(view, how).imbalance, "", **case)


def time_dispatch(report: Report) -> None:
    """One request and as many groups as there may be, of two sizes, each with another load."""
    generator = np.random.default_rng(0)
    used = [int(blocks) for blocks in generator.integers(0, 500, MAX_INSTANCES)]
    loads = [
        GroupLoad(LoadReport(GroupId(i), used_blocks=blocks), (1_000, 2_100)[i % 2])
        for i, blocks in enumerate(used)
    ]

    spent_ms, _ = best_ms(lambda: choose_group(loads, 20))
    report.add("time", spent_ms, "ms", decision="dispatch", groups=len(loads))


def time_prefixes(report: Report) -> None:
    """Prompts of several lengths whose beginning every group has, among 4,000 others each."""
    generator = np.random.default_rng(0)
    for num_tokens in (500, 4_000, 32_000):
        prompt = TokenIds(generator.integers(0, 50_000, num_tokens).tolist())
        spent_ms, names = best_ms(lambda p=prompt: prefix_hashes(p, NAMED_TOKENS))  # type: ignore[misc]
        indexes = [PrefixIndex() for _ in range(64)]
        others = tuple(generator.bytes(16) for _ in range(4_000))
        for index in indexes:
            index.add(others, 10_000)
            index.add(names, 10_000)
        case: dict[str, Setting] = {"decision": "prefix dispatch", "prompt tokens": num_tokens}
        report.add("naming", spent_ms, "ms", **case)
        spent_ms, _ = best_ms(lambda i=indexes, n=names: [one.depth(n) for one in i])  # type: ignore[misc]
        report.add("finding", spent_ms, "ms", **case)
        spent_ms, _ = best_ms(lambda i=indexes, n=names: i[0].add(n, 10_000))  # type: ignore[misc]
        report.add("remembering", spent_ms, "ms", **case)


def main() -> None:
    """All of them, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=MAX_INSTANCES)
    num_instances = parser.parse_args().instances
    with Report("decisions") as report:
        time_plans(report, num_instances)
        time_formations(report)
        time_dispatch(report)
        time_prefixes(report)


if __name__ == "__main__":
    main()
