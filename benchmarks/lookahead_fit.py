"""How wrong lookahead's coefficients are about the simulated GPUs whose steps they predict.

`python -m benchmarks.lookahead_fit` fits the cost model as an experiment does (`profile_times`)
and predicts random batches that the fit has not seen, against the roofline that times them in
the simulator. `tokens only` is the fit of a model that does not see attention, over
the same batches. Percent of the step: mean and largest.
"""

from collections.abc import Callable

import numpy as np

from kunserve.core.cost import CostSample
from kunserve.core.ids import RequestId
from kunserve.core.step import Chunk
from kunserve.policy.cost import OURS, TOKENS, as_vector
from kunserve.policy.cost_fit import fit, predict
from kunserve.sim.costs import profile_times
from kunserve.sim.devices import find_device
from kunserve.sim.models import find_model
from kunserve.sim.profile import InstanceProfile, gpu_profile

NUM_BATCHES = 300
MAX_TOKENS = 2048
PAIRS = (("Qwen/Qwen2.5-14B", "a800"), ("Qwen/Qwen2.5-72B", "h800"))

Batch = list[tuple[int, int]]
"""(prefix, length) of each chunk."""


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


KINDS: tuple[Callable[[np.random.Generator], Batch], ...] = (prompts, later_chunks, decodes, mixed)


def samples_of(profile: InstanceProfile, kind: Callable[[np.random.Generator], Batch]) -> list[
    CostSample
]:  # fmt: skip
    """Random batches of one kind, with the time that the simulator gives them."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(NUM_BATCHES):
        batch = kind(generator)
        chunks = [Chunk(RequestId(""), prefix, length, True) for prefix, length in batch]
        found.append(
            CostSample(
                region=kind.__name__,
                prefixes=tuple(prefix for prefix, _ in batch),
                lengths=tuple(length for _, length in batch),
                num_samples=len(batch),
                seconds=profile.times.stage_s(chunks, profile.spec.num_layers, True),
            )
        )
    return found


def main() -> None:
    """One line per pair and kind of batch."""
    for model, device in PAIRS:
        profile = gpu_profile(find_model(model), find_device(device))
        ours = as_vector(profile_times(profile.times, profile.spec.num_layers, MAX_TOKENS))
        everything = [sample for kind in KINDS for sample in samples_of(profile, kind)]
        tokens_only = fit(everything, TOKENS)
        for kind in KINDS:
            seen = samples_of(profile, kind)
            seconds = np.array([sample.seconds for sample in seen])
            cells = []
            for name, form, vector in (("ours", OURS, ours), ("tokens only", TOKENS, tokens_only)):
                errors = np.abs(predict(seen, form, vector) / seconds - 1.0)
                cells.append(f"{name} {errors.mean():.1%}, at most {errors.max():.0%}")
            print(f"{model} on {device}, {kind.__name__}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
