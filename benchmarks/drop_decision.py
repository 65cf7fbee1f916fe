"""What a shortage of all instances costs the controller: the look, the plan, and its beginnings.

    python -m benchmarks.drop_decision [--instances 1000]

The controller alone, without sockets: all instances report that memory is short. Counted is the
processor time of a report while nothing is short, of the tick that decides and begins the first
merges, of the turns of the loop in which the others are begun, of all of it together, and of the
ticks after it, while hundreds of transitions are under way. Median and longest of several clusters.
"""

import argparse
import gc
import statistics
import time

from benchmarks.many_instances import config_of
from benchmarks.report import Report
from kunserve.control.cluster.commands import Send
from kunserve.control.cluster.controller import Controller
from kunserve.core.ids import InstanceId
from kunserve.core.load import LoadReport
from kunserve.core.messages import Form, Formed, Ready
from kunserve.core.messages import Report as LeaderReport
from kunserve.core.plan import Plan
from kunserve.core.transfer import PeerAddress
from kunserve_lab.world.fake_body import fake_spec

PERIOD_S = 0.1


def standing(num_instances: int) -> Controller:
    """A controller whose instances all stand alone."""
    controller = Controller(Plan(config_of(num_instances, 1.0 / PERIOD_S)))
    for number in range(num_instances):
        me = InstanceId(number)
        spec = fake_spec(me, 8, 64 * 8, block_size=16, layer_bytes=16384, granule_bytes=4096)
        controller.on(me, Ready(spec, PeerAddress("", ""), 1024, ""), 0.0)
        for command in controller.drain():
            if isinstance(command, Send) and isinstance(command.message, Form):
                formed = Formed(command.instance_id, command.message.layout.group_id, 0)
                controller.on(command.instance_id, formed, 0.0)
    return controller


def report_all(controller: Controller, number: int, used: int, waiting: int, now_s: float) -> float:
    """Every leader reports; processor time of all of it."""
    started_s = time.thread_time()
    for group in list(controller.placement.groups.values()):
        load = LoadReport(
            group.layout.group_id,
            number,
            num_running=4,
            num_waiting=waiting,
            used_blocks=used,
            growth_blocks=4,
            capacity_blocks=group.capacity_blocks,
            head_of_line_blocks=26 if waiting else 0,
            waiting_blocks=26 * waiting,
            waiting_tokens=400 * waiting,
        )
        controller.on(group.layout.leader, LeaderReport(group.layout.leader, load), now_s)
    return time.thread_time() - started_s


def tick_ms(controller: Controller, now_s: float) -> float:
    """Processor time of one tick."""
    started_s = time.thread_time()
    controller.tick(now_s)
    return (time.thread_time() - started_s) * 1e3


def telling_ms(controller: Controller, now_s: float) -> float:
    """Processor time of one turn in which a few more merges are begun."""
    started_s = time.thread_time()
    controller.tell_more(now_s)
    return (time.thread_time() - started_s) * 1e3


def main() -> None:
    """Several clusters, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    names = ("report", "deciding tick", "turn that begins more", "decision, all of it")
    found: dict[str, list[float]] = {name: [] for name in (*names, "later tick")}
    merges = 0
    for _ in range(options.rounds):
        controller, now_s = standing(options.instances), 0.0
        gc.collect()
        gc.freeze()  # as `kunserve serve` does
        for number in range(1, 4):
            now_s += PERIOD_S
            spent_s = report_all(controller, number, 10, 0, now_s)
        found["report"].append(spent_s / options.instances * 1e3)
        now_s += PERIOD_S
        report_all(controller, 4, 62, 3, now_s)
        decision_ms = tick_ms(controller, now_s + PERIOD_S)
        found["deciding tick"].append(decision_ms)
        while controller.has_more_to_tell:
            turn_ms = telling_ms(controller, now_s + PERIOD_S)
            found["turn that begins more"].append(turn_ms)
            decision_ms += turn_ms
        found["decision, all of it"].append(decision_ms)
        merges = len(controller.transitions.active)
        found["later tick"].append(tick_ms(controller, now_s + 2 * PERIOD_S))
    with Report("drop_decision", instances=options.instances, merges=merges) as report:
        for name, values in found.items():
            report.add(name, statistics.median(values), "ms")
            report.add(f"{name}, longest", max(values), "ms")


if __name__ == "__main__":
    main()
