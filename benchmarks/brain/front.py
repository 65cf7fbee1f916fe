"""How long the front's decisions hold it up when there is much of everything.

    python -m benchmarks.brain.front [--beside TREE]

A hundred thousand requests wait: what a tick and a look at the backlog cost while no group stands,
and while a suspect is held and no group is kept for its test. One of a thousand instances forms
anew. A request comes, and 8 or 128 groups are there. Processor time, best of several. Targets: 2 ms
for a tick and for a `Form`. With --beside the same is measured in another checkout of the
project, in turn with this one.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import Report
from kunserve.control.cluster.commands import Send
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.requests.quarantine import Blame
from kunserve.core.config import KunServeConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import (
    Committed,
    ExchangeDone,
    Form,
    Formed,
    Prepared,
    Ready,
)
from kunserve.core.messages import (
    Report as Load,
)
from kunserve.core.plan import Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.tokens import TokenIds

NUM_LAYERS = 30
NUM_WAITING = 100_000
NUM_INSTANCES = 1_000
NUM_LOST = 140
REPEATS = 7
ROUNDS = 2
"""Of each checkout."""


class Front:
    """A controller whose instances are played."""

    def __init__(self, num_instances: int, *, are_formed: bool = True) -> None:
        self.controller = Controller(Plan(KunServeConfig()))
        self.now_s = 0.0
        self._are_formed = are_formed
        for number in range(num_instances):
            self.start(InstanceId(number))

    def start(self, instance_id: InstanceId) -> None:
        """An instance is ready, and stands in a group of its own at once."""
        layer_bytes, unit_bytes, granule_bytes, units = 7_080_192, 12_288, 1 << 18, 20_000
        memory_bytes = NUM_LAYERS * layer_bytes + units * unit_bytes
        sizes = (NUM_LAYERS, 16, unit_bytes, layer_bytes, memory_bytes, units, granule_bytes)
        spec = InstanceSpec(instance_id, *sizes)
        event = Ready(spec, f"address {instance_id}", 4096, "")  # type: ignore[arg-type]
        self.controller.on(instance_id, event, self.now_s)
        for command in self.controller.drain() if self._are_formed else ():
            if isinstance(command, Send) and isinstance(command.message, Form):
                formed = Formed(command.instance_id, command.message.layout.group_id, 0)
                self.controller.on(command.instance_id, formed, self.now_s)
        self.controller.drain()

    def ask(self, number: int) -> None:
        """A request comes."""
        prompt = TokenIds([number % 50_000] * 64)
        request = Request(RequestId(f"r{number}"), prompt, SamplingParams(64), self.now_s)
        self.controller.arrive(request, print, self.now_s)

    def report(self) -> None:
        """Every leader reports that it runs what it was sent."""
        for group in list(self.controller.placement.groups.values()):
            load = LoadReport(group.layout.group_id, 1, num_running=1, used_blocks=100)
            self.controller.on(group.layout.leader, Load(group.layout.leader, load), self.now_s)

    def tick(self) -> None:
        """Its time has come."""
        self.now_s += 0.1
        self.controller.tick(self.now_s)
        self.controller.drain()

    def merge(self, first: InstanceId) -> None:
        """Two neighbours become a pipeline."""
        pair = (first, InstanceId(first + 1))
        halves = (LayerRange(0, NUM_LAYERS // 2), LayerRange(NUM_LAYERS // 2, NUM_LAYERS))
        controller = self.controller
        found = map(controller.placement.with_member, pair)
        old = tuple(group.layout for group in found if group is not None)
        new = GroupLayout(controller.placement.new_ids(1), tuple(map(Stage, pair, halves)))
        (name,) = controller.transitions.begin_drops([(old, new)], "benchmark", self.now_s)
        for member in pair:
            controller.on(member, Prepared(name, member, None), self.now_s)
        for member, half in zip(pair, halves, strict=True):
            event = Committed(name, member, half, 0, 0, 0.0, 0.0, ())
            controller.on(member, event, self.now_s)
        done = ExchangeDone(name, GroupId(new.group_id), 0, 0, 0.0, 0.0)
        controller.on(first, done, self.now_s)
        controller.drain()


def best_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The least processor time of a call."""
    times_s = []
    for _ in range(repeats):
        began_s = time.thread_time()
        call()
        times_s.append(time.thread_time() - began_s)
    return min(times_s) * 1e3


def figures() -> Iterator[tuple[str, float]]:
    """Every case by name, in milliseconds."""
    front = Front(2, are_formed=False)
    for number in range(NUM_WAITING):
        front.ask(number)
    yield "tick, no group stands", best_ms(front.tick)

    front = Front(2)
    front.ask(0)
    for place in (0, 1):  # the request is where somebody dies twice, and the other one has work
        front.controller.lost(InstanceId(place), "exit code 1", front.now_s, Blame())
        if place == 0:
            front.start(InstanceId(0))
            for number in range(1, 9):
                front.ask(number)
    for number in range(9, NUM_WAITING):
        front.ask(number)
    front.report()
    assert front.controller._requests.quarantine.holds(RequestId("r0"))
    yield "tick, a suspect is held", best_ms(front.tick)
    yield "place, a suspect is held", best_ms(front.controller._requests.place)

    front = Front(NUM_INSTANCES)
    pairs = [InstanceId(number) for number in range(NUM_INSTANCES - 2 * NUM_LOST, NUM_INSTANCES, 2)]
    for first in pairs:
        front.merge(first)

    def lose() -> None:
        for _ in range(NUM_LOST // REPEATS):
            front.controller.lost(pairs.pop(), "gone", front.now_s)
            front.controller.drain()

    yield "one of 1,000 forms anew", best_ms(lose) / (NUM_LOST // REPEATS)
    for num_groups in (8, 128):
        front = Front(num_groups)
        numbers = iter(range(1_000_000))

        def come(front: Front = front, numbers: Iterator[int] = numbers) -> None:
            for _ in range(50):
                front.ask(next(numbers))
            front.controller.drain()

        yield f"a request comes, {num_groups} groups", best_ms(come) / 50


def measured_in(tree: Path) -> dict[str, float]:
    """The same of a checkout, in a process of its own."""
    here = os.fspath(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([os.fspath(tree.resolve()), here])
    command = [sys.executable, __file__, "--say"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, cwd=tree, capture_output=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """In turn, so that what else the machine does falls on both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout of the project")
    parser.add_argument("--say", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.say:
        gc.disable()
        print(json.dumps(dict(figures())))
        return
    here = Path(__file__).resolve().parents[2]
    trees = {"this": here} | ({} if args.beside is None else {"other": args.beside})
    rounds = [(name, measured_in(tree)) for _ in range(ROUNDS) for name, tree in trees.items()]
    with Report("front") as report:
        for case in rounds[0][1]:
            for tree in trees:
                best = min(found[case] for name, found in rounds if name == tree)
                report.add("time", best, "ms", case=case, tree=tree)


if __name__ == "__main__":
    main()
