"""Whether steps of a real server take as long as its profile says; where not, which and when.

    kunserve serve MODEL ... --trace-out trace.json      (then load it, and stop it)
    python -m benchmarks.step_times --profile profile.json trace.json

Every step of the trace against the profile's prediction for the same batch, in company or alone as
it was: by what the batch held, and by whether another instance computed at the time. Also how long
an instance stood between two steps while it had work, and what the cost model is when fitted to
these very steps. `benchmarks/overload_curve.py --traces` keeps the traces of its servers.
"""

import argparse
import itertools
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.traced_steps import (
    TracedStep,
    fit_steps,
    num_layers_of,
    overlaps,
    predicted_s,
    read_steps,
)
from kunserve.model.profile import Profile, read_profile

CLOSE_S = 0.02
"""Steps that follow each other within this are back to back: the instance had work."""


def kind_of(step: TracedStep, num_layers: int) -> str:
    """What the batch held."""
    where = "" if step.layers == (0, num_layers) else "stage: "
    if step.num_prompt_tokens:
        return where + ("prompts and decodes" if step.num_decodes else "prompts")
    for most in (1, 4, 16, 64):
        if step.num_decodes <= most:
            return f"{where}decodes, up to {most:2}"
    return f"{where}decodes, more"


def show_ratios(steps: list[TracedStep], profile: Profile) -> None:
    """One line per kind of step and company."""
    num_layers = num_layers_of(steps)
    shares = np.minimum(overlaps(steps), 1.0)
    beside, alone = (predicted_s(c, steps) for c in (profile.serving, profile.alone))
    expected = shares * beside + (1.0 - shares) * alone
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for step, share, expected_s in zip(steps, shares.tolist(), expected.tolist(), strict=True):
        company = "alone" if share < 0.1 else "among others" if share > 0.9 else "partly"
        groups[kind_of(step, num_layers), company].append((step.seconds, expected_s))
    print(f"{'':28}{'':14}{'steps':>7}{'real ms':>9}{'predicted':>11}{'real / predicted':>18}")
    for (kind, company), pairs in sorted(groups.items()):
        real_s, mean_s = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        print(
            f"{kind:28}{company:14}{len(pairs):7}{real_s * 1e3:9.1f}{mean_s * 1e3:11.1f}"
            f"{real_s / mean_s:18.2f}"
        )


def show_gaps(steps: list[TracedStep]) -> None:
    """How long instances stood between steps that follow each other closely."""
    by_instance: dict[int, list[TracedStep]] = defaultdict(list)
    for step in steps:
        by_instance[step.instance].append(step)
    gaps_s = [
        later.start_s - sooner.end_s
        for mine in by_instance.values()
        for sooner, later in itertools.pairwise(mine)
        if later.start_s - sooner.end_s < CLOSE_S
    ]
    print(
        f"between steps back to back: median {statistics.median(gaps_s) * 1e3:.2f} ms, "
        f"mean {statistics.fmean(gaps_s) * 1e3:.2f} ms ({len(gaps_s)})"
    )


def main() -> None:
    """The table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--profile", type=Path, required=True)
    options = parser.parse_args()
    profile = read_profile(options.profile)
    for path in options.traces:
        steps = read_steps(path)
        print(f"\n{path.name}: {len(steps)} steps")
        show_ratios(steps, profile)
        show_gaps(steps)
        for name, cost in zip(("among others", "alone"), fit_steps(steps), strict=True):
            print(f"fitted to these steps, {name}: {cost}")


if __name__ == "__main__":
    main()
