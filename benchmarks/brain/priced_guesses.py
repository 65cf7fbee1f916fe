"""Guesses priced by memory: what they gain where KV is short, if checking reads KV once.

    python -m benchmarks.brain.priced_guesses >> benchmarks/results/priced_guesses.jsonl
    python -m benchmarks.brain.priced_guesses --table

Simulated instances that guess. No tokens are looked up: a request has guesses at a share of its
steps, and each is right with a chance that the policy learns as it does today. Unlike today's
policy, steps with prompts and with many decodes have guesses too.

How many: the most tokens per time of the decodes (a step's prompts are left out of the time: while
memory is short each token of an answer brings its share of prompts). Priced, a token counts
``1 + price * KV / mean KV``, and the price is the number of waiting requests per running one.
A request's KV is read once however many of its rows a step has (but in `by row`). `guesses` is a
bound: no lookup costs anything, step times are known exactly, and neither a step's tokens nor rows
bound its guesses. `rule` is what could be built: guesses are chosen before prompts have what is
left of a step's tokens, by the fitted cost model, with the margins and limits of today's policy.
`no floor` is the rule without `LEAST_ROW_SHARE`, and `no limits` without `MOST_ROWS` either.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.brain.guessing_world import Checked, Guessed, GuessingWorld, Limits, Text
from benchmarks.brain.row_times import RowTimes
from benchmarks.brain.study import run_study
from benchmarks.paper.points import HEAVY_27, LONGBENCH_44, UNSEEN, Named, figures_of_run
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.devices import find_device

BENCHMARK = "priced_guesses"
POINTS = (*UNSEEN, LONGBENCH_44, HEAVY_27)
SEEDS = (5, 6, 7)

MEASURED = (Text(0.26, 0.84), Text(0.76, 0.60), Text(1.0, 0.82), Text(0.93, 0.86), Text(0.0, 0.0))
"""SmolLM2's chats, summaries, extractions, edits and noise (docs/decisions/speculative.md at
71e062a4). Shares of steps are reckoned from the speed of one stream."""
TEXTS = {
    "weak": (Text(0.3, 0.3),),
    "0.3": (Text(1.0, 0.3),),
    "0.45": (Text(1.0, 0.45),),
    "0.6": (Text(1.0, 0.6),),
    "chat": MEASURED[:1],
    "measured": MEASURED,
}
"""Each request is one of these, drawn evenly."""
LIMITS = {
    "rule": Limits(),
    "no floor": Limits(least_row_share=0.0),
    "no limits": Limits(most_rows=10_000, least_row_share=0.0),
}
GUESSED = (
    {
        f"{system}, guesses {name}": Guessed(system, texts)
        for name, texts in TEXTS.items()
        for system in ("recompute", "drop")
    }
    | {
        f"{system}, {kind} {name}": Guessed(system, texts, limits=limits)
        for name, texts in TEXTS.items()
        for kind, limits in LIMITS.items()
        for system in ("recompute", "drop")
    }
    | {
        "recompute, unpriced 0.45": Guessed("recompute", TEXTS["0.45"], is_priced=False),
        "recompute, by row 0.3": Guessed("recompute", TEXTS["0.3"], reads_once=False),
        "recompute, by row 0.6": Guessed("recompute", TEXTS["0.6"], reads_once=False),
    }
)
VARIANTS = ("drop", "recompute", "endless", *GUESSED)


def run(variant: str, scenario: Scenario) -> Iterator[Named]:
    """One variant of one draw."""
    guessed = GUESSED.get(variant)
    if guessed is None:
        yield from figures_of_run(simulate(find_system(variant), scenario), scenario)
        return
    profile = scenario.profile
    device, once = find_device("a800"), guessed.reads_once
    times = RowTimes(profile.model, device, profile.num_gpus, reads_once=once)
    scenario = replace(scenario, profile=replace(profile, times=times))
    checked = Checked()

    def make_world(*args: Any) -> GuessingWorld:
        return GuessingWorld(
            *args, guessed=guessed, times=times, cost=scenario.cost, checked=checked
        )

    result = simulate(find_system(guessed.system), scenario, make_world=make_world)
    yield from figures_of_run(result, scenario)
    yield "guesses", checked.num_guesses / max(1, checked.num_steps), "of a step"


def main() -> None:
    """Every variant at every point."""
    run_study(BENCHMARK, __doc__, POINTS, VARIANTS, SEEDS, run)


if __name__ == "__main__":
    main()
