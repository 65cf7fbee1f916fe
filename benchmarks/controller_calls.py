"""What single calls of the controller cost while hundreds of groups merge, in virtual time.

    python -m benchmarks.controller_calls [--instances 1000] [--requests 6] [--seconds 3]

The simulator drives the real controller: a burst fills the memory of all instances, and they merge.
Each call is one turn of a served front's loop at most, so the longest one is how long HTTP waits.
Only processor time of the calls counts, so other work on the machine changes little. Said for each
kind of event: how many came, what all of them cost, and the longest. ``tell more`` are the turns in
which merges of a plan are begun.
"""

import argparse
import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.report import Report
from kunserve.control.cluster.controller import Controller
from kunserve.core.config import SchedulerConfig
from kunserve.core.snapshots import Kind
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import LEAD_S, simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile
from kunserve_lab.workload.workload import Lengths, Workload

PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 200
POOL_TOKENS = 4000
"""KV of one instance: four prompts."""
BURST_S = 0.5


class Over(Exception):
    """The virtual time is over."""


class Clock:
    """Processor time of each call, by what it was told."""

    def __init__(self, until_s: float) -> None:
        self.spent_s: defaultdict[str, list[float]] = defaultdict(list)
        self.num_drops = 0
        self._until_s = until_s

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same call, whose time is noted."""

        def run(controller: Controller, *args: Any) -> Any:
            kind = type(args[1]).__name__ if name == "on" else name.replace("_", " ")
            started_s = time.thread_time()
            try:
                return call(controller, *args)
            finally:
                self.spent_s[kind].append(time.thread_time() - started_s)
                if name == "tick" and args[0] > self._until_s:
                    records = controller.transitions.latest()
                    self.num_drops = sum(record.kind is Kind.DROP for record in records)
                    raise Over

        return run


def scenario(num_instances: int, num_requests: int) -> Scenario:
    """A burst of so many requests for each instance."""
    profile = gpu_profile(find_model("Qwen2.5-14B"), find_device("a800"))
    spec = profile.spec
    kv_units = POOL_TOKENS // spec.block_size * spec.num_layers
    memory = spec.memory_bytes + (kv_units - spec.kv_units) * spec.unit_bytes
    profile = replace(profile, spec=replace(spec, kv_units=kv_units, memory_bytes=memory))
    num = num_instances * num_requests
    lengths = Lengths((PROMPT_TOKENS,) * num, (OUTPUT_TOKENS,) * num, "fixed")
    workload = Workload(tuple(i * BURST_S / num for i in range(num)), lengths, "burst")
    cost = profile_times(profile.times, spec.num_layers, 2048)
    return Scenario(profile, num_instances, workload, SchedulerConfig(256, 2048), cost=cost)


def main() -> None:
    """One burst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    clock = Clock(LEAD_S + options.seconds)
    for name in ("on", "tick", "arrive", "tell_more"):
        if hasattr(Controller, name):
            setattr(Controller, name, clock.timed(getattr(Controller, name), name))
    gc.disable()
    with contextlib.suppress(Over):
        simulate(find_system("drop"), scenario(options.instances, options.requests))
    settings = {"instances": options.instances, "requests": options.requests}
    with Report("controller_calls", seconds=options.seconds, **settings) as report:
        report.add("transitions", clock.num_drops, "", event="all")
        for kind, spent_s in sorted(clock.spent_s.items(), key=lambda item: -sum(item[1])):
            report.add("calls", len(spent_s), "", event=kind)
            report.add("together", sum(spent_s), "s", event=kind)
            report.add("longest", max(spent_s) * 1e3, "ms", event=kind)


if __name__ == "__main__":
    main()
