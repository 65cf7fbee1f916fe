"""Held-out error of the cost model and of those that the paper criticises, on the same samples.

`python -m benchmarks.cost_model --profile P.json --out cost-model.png` (`kunserve profile` makes
P.json; with `--max-num-batched-tokens 4096` chunks get long enough to set the models apart). The
figure has the shape of the paper's: predicted over measured time by chunk length, without and
with a prefix.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kunserve.core.cost import CostSample
from kunserve.model.profile import Profile, read_profile
from kunserve.policy.cost import DISTSERVE, FORMS, NANOFLOW, OURS, PAPER, TOKENS
from kunserve.policy.cost_fit import fit, held_out_errors, predict_held_out

matplotlib.use("Agg")

_COLORS = {OURS: "#2b6cb0", NANOFLOW: "#dd8a1b", DISTSERVE: "#c53030", TOKENS: "#9aa5b1"}
_MARKS = {OURS: "o", NANOFLOW: "^", DISTSERVE: "s", TOKENS: "x"}
TERM_NAMES = ("attention", "token", "own_chunk", "shared", "context", "sample", "narrow")


def print_errors(profile: Profile) -> None:
    """One line of JSON per model: percent, mean and largest, per region."""
    for form in FORMS:
        errors = held_out_errors(profile.samples, form)
        line: dict[str, object] = {"model": form.name}
        for region, error in errors.items():
            line[region] = [round(error.mean * 100, 2), round(error.largest * 100, 1)]
        vector = fit(profile.samples, form).tolist()
        line["coefficients_us"] = {
            name: round(value * 1e6, 3) for name, value in zip(TERM_NAMES, vector, strict=True)
        }
        print(json.dumps(line), flush=True)


def draw(profile: Profile, path: Path) -> None:
    """The figure: two panels of relative error, and the errors by region beside them."""
    figure = Figure(figsize=(11, 3.4), layout="constrained", dpi=130)
    left, middle, right = figure.subplots(1, 3)
    _draw_region(left, profile.samples, "prefill", "Chunks without prefix")
    _draw_region(middle, profile.samples, "prefix", "Chunks with prefix")
    _draw_bars(right, profile.samples)
    left.set_ylabel("predicted against measured (%)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    subject = profile.subject
    figure.suptitle(
        f"{subject.model}, {subject.dtype}, {subject.num_threads} thread(s) of {profile.device}: "
        f"held-out predictions ({profile.clock})",
        x=0.01, ha="left", fontsize=9,
    )  # fmt: skip
    figure.savefig(path)


def _draw_region(axis: Axes, samples: Sequence[CostSample], region: str, title: str) -> None:
    inside = np.array([sample.region == region for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    tokens = np.array([sum(sample.lengths) for sample in samples])
    for form, color in _COLORS.items():
        error = 100 * (predict_held_out(samples, form) / seconds - 1)
        axis.scatter(
            tokens[inside], error[inside], s=16, color=color, marker=_MARKS[form], label=form.name
        )
    axis.axhspan(-5, 5, color="#2b6cb0", alpha=0.08, linewidth=0)
    axis.axhline(0, color="#888888", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens in the batch")
    axis.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    _clean(axis)


def _draw_bars(axis: Axes, samples: Sequence[CostSample]) -> None:
    regions = ("prefill", "prefix", "decode", "mixed")
    shown = (OURS, PAPER, NANOFLOW, DISTSERVE, TOKENS)
    width = 0.8 / len(shown)
    for place, form in enumerate(shown):
        errors = held_out_errors(samples, form)
        heights = [errors[region].mean * 100 for region in regions]
        at = np.arange(len(regions)) + (place - 2) * width
        axis.bar(at, heights, width, color=_COLORS.get(form, "#90cdf4"), label=form.name)
    axis.axhline(5, color="#333333", linewidth=0.8, linestyle="--")
    axis.set_xticks(np.arange(len(regions)), regions)
    axis.set_ylabel("mean absolute error (%)")
    axis.set_title("By region (light blue: Eq. 1-3 alone)", loc="left", fontsize=9.5,
                   fontweight="bold")  # fmt: skip
    _clean(axis)


def _clean(axis: Axes) -> None:
    axis.grid(color="#e4e4e4", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Errors to the terminal, the figure to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("cost-model.png"))
    args = parser.parse_args()
    profile = read_profile(args.profile)
    print_errors(profile)
    draw(profile, args.out)
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
