"""How long a drop plan (Algorithm 1) takes: ``python benchmarks/drop_plan.py [--instances N]``.

The best of several runs on this machine, in milliseconds. The target is 10,000 instances in
under 50 ms.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import InstanceSpec
from kunserve.policy.drop_plan import DropPlan, plan_drop

NUM_LAYERS = 30
REPEATS = 5


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
    first_id = GroupId(num_instances)
    return {
        name: partial(plan_drop, layouts, specs, required, first_id=first_id)
        for name, required in (
            ("one merge", 1),
            ("every instance paired", 287 * num_instances),
            ("all that can be dropped", 1 << 60),
        )
    }


def best_ms(call: Callable[[], DropPlan]) -> tuple[float, DropPlan]:
    """The least wall time of ``REPEATS`` calls, and the last plan."""
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        plan = call()
        times.append((time.perf_counter() - start_s) * 1e3)
    return min(times), plan


def main() -> None:
    """Print one line per cluster and requirement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    num_instances = parser.parse_args().instances
    print(f"{num_instances} instances")
    print(f"{'budgets':>8} {'requirement':<26} {'ms':>8} {'groups':>7} {'stages':>7} {'blocks':>9}")
    for num_budgets in (1, 4, 64):
        for name, call in plans(num_instances, num_budgets).items():
            spent_ms, plan = best_ms(call)
            stages = max((len(merge.new.stages) for merge in plan.merges), default=1)
            print(
                f"{num_budgets:>8} {name:<26} {spent_ms:>8.1f} {len(plan.merges):>7} "
                f"{stages:>7} {plan.gain_blocks:>9}"
            )


if __name__ == "__main__":
    main()
