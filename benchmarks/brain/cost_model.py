"""How far the cost model is off: against a profile's measured steps, or the simulator's roofline.

    python -m benchmarks.brain.cost_model --against profile --profile P.json [--figure F.png]
    python -m benchmarks.brain.cost_model --against roofline
    python -m benchmarks.brain.cost_model --against sparse

*Profile*: held-out errors of our model and of those that the paper criticises, on the samples of
`kunserve profile` (with `--max-num-batched-tokens 4096` chunks get long enough to set them apart).
The figure has the shape of the paper's: predicted over measured time by chunk length, without and
with a prefix. *Roofline*: the model as an experiment fits it (`profile_times`) predicts random
batches that the fit has not seen, which the roofline times in the simulator; *no attention* is
fitted to these very batches. *Sparse*: the same for models of experts, and held-out errors of our
form with and without its term for experts. Batches are of 1 token and more.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Report, Setting
from kunserve.core.cost import DENSE, CostSample, ExpertChoice
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.model.profile import Profile, read_profile
from kunserve_lab.profile.cost_fit import fit, held_out_errors, predict, predict_held_out, sized
from kunserve_lab.profile.cost_forms import (
    DISTSERVE,
    NANOFLOW,
    OURS,
    PAPER,
    TOKENS,
    CostForm,
    as_vector,
    forms_for,
)
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile, gpu_profile

matplotlib.use("Agg")

_COLORS = {OURS: "#2b6cb0", NANOFLOW: "#dd8a1b", DISTSERVE: "#c53030", TOKENS: "#9aa5b1"}
_MARKS = {OURS: "o", NANOFLOW: "^", DISTSERVE: "s", TOKENS: "x"}
TERM_NAMES = ("attention", "token", "own_chunk", "shared", "context", "sample", "narrow", "expert")


NUM_BATCHES = 300
MAX_TOKENS = 2048
PAIRS = (("Qwen/Qwen2.5-14B", "a800"), ("Qwen/Qwen2.5-72B", "h800"))
SPARSE_PAIRS = (
    ("allenai/OLMoE-1B-7B-0924", "a800"),
    ("mistralai/Mixtral-8x7B-v0.1", "a800"),
    ("Qwen/Qwen3-30B-A3B", "a800"),
    ("Qwen/Qwen3-235B-A22B", "h800"),
    ("deepseek-ai/DeepSeek-V3", "h800"),
)

Batch: TypeAlias = list[tuple[int, int]]
"""(prefix, length) of each chunk."""


def against_profile(report: Report, profile: Profile) -> None:
    """Errors per model and region, and each model's coefficients."""
    forms = profile_forms(profile)
    for form in forms:
        for region, error in held_out_errors(profile.samples, form).items():
            report.add("mean error", error.mean * 100, "%", model=form.name, batch=region)
            report.add("largest error", error.largest * 100, "%", model=form.name, batch=region)
    for form in forms:
        found = sized(profile.samples, form)
        vector = fit(profile.samples, found).tolist()
        for name, value in zip(TERM_NAMES, vector, strict=True):
            report.add(name, value * 1e6, "us", model=form.name)
    experts = sized(profile.samples, forms[0]).experts
    if experts != DENSE:
        report.add("acts as one of", experts.num, "experts", model=forms[0].name)
        report.add("alike", 100 * experts.alike, "% of a chunk's tokens", model=forms[0].name)
        if experts.rows_per_read is not None:
            report.add(
                "a read takes as long as", experts.rows_per_read, "rows", model=forms[0].name
            )


def profile_forms(profile: Profile) -> tuple[CostForm, ...]:
    """Ours first; of a sparse model with as many experts as it was found to act as."""
    experts = profile.coefficients.experts
    return forms_for(ExpertChoice(experts.num, experts.per_token))


def prompts(generator: np.random.Generator) -> Batch:
    """One to four prompts from their beginning."""
    count = int(generator.integers(1, 5))
    return [(0, int(generator.integers(2, MAX_TOKENS // count))) for _ in range(count)]


def later_chunks(generator: np.random.Generator) -> Batch:
    """One chunk of a prompt, after up to 16 K tokens of it."""
    return [(int(generator.integers(1, 16_384)), int(generator.integers(64, MAX_TOKENS)))]


def decodes(generator: np.random.Generator) -> Batch:
    """Up to 256 requests that decode."""
    count = int(generator.integers(1, 257))
    return [(int(prefix), 1) for prefix in generator.integers(16, 8192, count)]


def mixed(generator: np.random.Generator) -> Batch:
    """Decodes and a chunk beside them: what most steps of a burst are."""
    return decodes(generator) + later_chunks(generator)


KINDS: dict[str, Callable[[np.random.Generator], Batch]] = {
    "prefill": prompts,
    "prefix": later_chunks,
    "decode": decodes,
    "mixed": mixed,
}


def sparse_decodes(generator: np.random.Generator) -> Batch:
    """As many requests that decode, on a log scale: few of them touch few experts."""
    count = round(2 ** generator.uniform(0, 9))
    return [(int(prefix), 1) for prefix in generator.integers(16, 8192, count)]


SPARSE_KINDS = KINDS | {"decode": sparse_decodes}


def roofline_samples(
    profile: InstanceProfile,
    region: str,
    kinds: dict[str, Callable[[np.random.Generator], Batch]] = KINDS,
) -> list[CostSample]:
    """Random batches of one kind, with the time that the simulator gives them."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(NUM_BATCHES):
        batch = kinds[region](generator)
        chunks = [Chunk(RequestId(""), prefix, length, True) for prefix, length in batch]
        found.append(
            CostSample(
                region=region,
                prefixes=tuple(prefix for prefix, _ in batch),
                lengths=tuple(length for _, length in batch),
                num_samples=len(batch),
                seconds=profile.times.stage_s(chunks, profile.spec.num_layers, True),
            )
        )
    return found


def against_roofline(report: Report) -> None:
    """Errors per simulated GPU, model and kind of batch."""
    for model, device in PAIRS:
        profile = gpu_profile(find_model(model), find_device(device))
        ours = as_vector(profile_times(profile.times, profile.spec.num_layers, MAX_TOKENS))
        by_region = {region: roofline_samples(profile, region) for region in KINDS}
        everything = [sample for samples in by_region.values() for sample in samples]
        no_attention = fit(everything, TOKENS)
        for region, samples in by_region.items():
            seconds = np.array([sample.seconds for sample in samples])
            for form, vector in ((OURS, ours), (TOKENS, no_attention)):
                errors = np.abs(predict(samples, form, vector) / seconds - 1.0) * 100
                case: dict[str, Setting] = {
                    "steps": f"{model}, {device}",
                    "model": form.name,
                    "batch": region,
                }
                report.add("mean error", float(errors.mean()), "%", **case)
                report.add("largest error", float(errors.max()), "%", **case)


def against_sparse(report: Report) -> None:
    """Per model of experts: what formation plans with, and both forms held out, five-fold."""
    for name, device in SPARSE_PAIRS:
        model = find_model(name)
        profile = gpu_profile(model, find_device(device))
        ours, dense = forms_for(model.experts)[0], OURS
        planned = profile_times(profile.times, profile.spec.num_layers, MAX_TOKENS, model.experts)
        planning = replace(ours, experts=planned.experts)
        samples = [
            sample
            for region in SPARSE_KINDS
            for sample in roofline_samples(profile, region, SPARSE_KINDS)
        ]
        seconds = np.array([sample.seconds for sample in samples])
        regions = np.array([sample.region for sample in samples])
        for what, predicted in (
            ("planned with", predict(samples, planning, as_vector(planned))),
            ("held out", predict_held_out(samples, ours)),
            ("held out, no experts", predict_held_out(samples, dense)),
        ):
            errors = np.abs(predicted / seconds - 1.0) * 100
            for region in SPARSE_KINDS:
                case: dict[str, Setting] = {
                    "steps": f"{name}, {device}",
                    "fit": what,
                    "batch": region,
                }
                inside = errors[regions == region]
                report.add("mean error", float(inside.mean()), "%", **case)
                report.add("largest error", float(inside.max()), "%", **case)


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
    """Errors as figures; with a profile also drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", choices=["profile", "roofline", "sparse"], required=True)
    parser.add_argument("--profile", type=Path, help="of `kunserve profile`")
    parser.add_argument("--figure", type=Path, help="where the figure of a profile goes")
    options = parser.parse_args()
    if (options.against == "profile") != (options.profile is not None):
        parser.error("--profile belongs to --against profile, and is needed there")
    if options.against == "roofline":
        with Report("cost_model", against="roofline") as report:
            against_roofline(report)
        return
    if options.against == "sparse":
        with Report("cost_model", against="sparse") as report:
            against_sparse(report)
        return
    profile = read_profile(options.profile)
    with Report("cost_model", against="profile", profile=options.profile.name) as report:
        against_profile(report, profile)
    if options.figure is not None:
        draw(profile, options.figure)


if __name__ == "__main__":
    main()
