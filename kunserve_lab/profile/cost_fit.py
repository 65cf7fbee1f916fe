"""Coefficients from measured batches: non-negative least squares, and how well they predict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from kunserve.core.cost import DENSE, CostSample, ExpertChoice
from kunserve.policy.batch.cost import Array
from kunserve_lab.profile.cost_forms import OURS, CostForm

NUM_FOLDS = 5
TOKENS_TERM = 1
"""Where ``CostForm.features`` counts a batch's tokens."""
EXPERT_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Of a layer's experts, how many it may act as."""
ALIKE = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""How alike a chunk's tokens may choose."""
ROWS_PER_READ = (None, *(4.0 * 2.0 ** (step / 4) for step in range(33)))
"""Rows of an expert whose arithmetic may take as long as reading it: none, or 4 to 1,024."""
NUM_TURNS = 3
"""In which each of the three is chosen while the others stand."""
LEAST_GAIN = 0.05
"""Of the squared error, what another choice must take off: noise alone chooses nothing."""
LEAST_ERROR = 1e-6
"""Squared, of a batch: 0.1 %, below which nothing is left to explain."""
EXPERTS_TERM = 7
"""And its experts: the last one. Batches of a dense model have none."""
LEAST_TOKENS_SHARE = 1e-3
"""A token costs at least so much of the batch in which tokens weigh most.

Because formation divides by it, and on a busy machine a tiny model's time per token is lost in the
noise: the plain fit then says 0.
"""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Relative errors of predictions for batches that the fit had not seen."""

    num_samples: int
    mean: float
    """Mean absolute error over measured time, as a fraction."""
    largest: float


def fit(samples: Sequence[CostSample], form: CostForm = OURS) -> Array:
    """The vector of ``cost_forms.from_vector`` with the least squared *relative* error.

    Relative, so that a decode of 20 ms counts as much as a prefill of 2 s. Needs more samples
    than terms.
    """
    return fit_rows(feature_rows(samples, form), _seconds(samples))


def sized(samples: Sequence[CostSample], form: CostForm) -> CostForm:
    """The form with the experts that fit these samples best; a dense model's form as it is.

    Where some experts are popular, tokens share them, and a layer acts as one of fewer. Where a
    chunk's tokens are alike, fewer of them choose for themselves. Where an expert has many rows,
    arithmetic hides reading. Each is chosen from a few values, because none of it is linear.
    """
    if not form.added_terms or form.experts == DENSE:
        return form
    search = _Search(samples, form)
    for _ in range(NUM_TURNS):
        before = search.experts
        search.choose([replace(search.experts, rows_per_read=rows) for rows in ROWS_PER_READ])
        search.choose([replace(search.experts, alike=share) for share in ALIKE])
        search.choose([replace(search.experts, num=num) for num in _sizes(form.experts)])
        if search.experts == before:
            break
    return replace(form, experts=search.experts)


def _sizes(experts: ExpertChoice) -> list[int]:
    """Numbers of experts that a layer may act as, all of them first."""
    sizes = (max(experts.per_token, round(share * experts.num)) for share in EXPERT_SHARES)
    return list(dict.fromkeys(sizes))


class _Search:
    """For the experts that fit samples best. Only the last column of their features changes."""

    def __init__(self, samples: Sequence[CostSample], form: CostForm) -> None:
        self._rows, self._seconds = feature_rows(samples, form), _seconds(samples)
        self._sizes = [(float(sum(one.lengths)), float(len(one.lengths))) for one in samples]
        self.experts = form.experts
        self._misfit = self._misfit_of(form.experts)

    def choose(self, others: Sequence[ExpertChoice]) -> None:
        """The best of them, if it is clearly better than what there is."""
        misfits = [self._misfit_of(one) for one in others]
        least = min(misfits)
        if least < self._misfit * (1 - LEAST_GAIN):
            self.experts, self._misfit = others[misfits.index(least)], least

    def _misfit_of(self, experts: ExpertChoice) -> float:
        self._rows[:, EXPERTS_TERM] = [experts.reads(*size) for size in self._sizes]
        relative = self._rows @ fit_rows(self._rows, self._seconds) / self._seconds - 1.0
        return float((relative * relative).sum()) + LEAST_ERROR * len(relative)


def fit_rows(rows: Array, seconds: Array) -> Array:
    """``fit`` for batches that are known by their features: [samples, terms] and [samples].

    Errors count as shares of what was measured. A token always costs something
    (``LEAST_TOKENS_SHARE``).
    """
    if not rows[:, EXPERTS_TERM:].any() and rows.shape[1] > EXPERTS_TERM:
        return np.append(fit_rows(rows[:, :EXPERTS_TERM], seconds), 0.0)
    relative = rows / seconds[:, None]
    # Columns of like size: nnls compares them.
    scale = relative.max(axis=0)
    scale[scale == 0.0] = 1.0
    relative, seen = relative / scale, np.ones(len(seconds))
    solution, _ = nnls(relative, seen)
    if solution[TOKENS_TERM] < LEAST_TOKENS_SHARE:
        least = np.zeros_like(solution)
        least[TOKENS_TERM] = LEAST_TOKENS_SHARE
        above, _ = nnls(relative, seen - relative @ least)
        solution = least + above
    return np.asarray(solution / scale, dtype=np.float64)


def predict(samples: Sequence[CostSample], form: CostForm, vector: Array) -> Array:
    """Seconds that each batch takes according to a fitted form."""
    return feature_rows(samples, form) @ vector


def predict_held_out(samples: Sequence[CostSample], form: CostForm = OURS, seed: int = 0) -> Array:
    """Seconds of each batch, predicted by a fit to the other folds."""
    folds = _folds(samples, seed)
    predicted = np.zeros(len(samples))
    for fold in range(NUM_FOLDS):
        inside = np.flatnonzero(folds == fold).tolist()
        seen = [samples[i] for i in np.flatnonzero(folds != fold).tolist()]
        found = sized(seen, form)
        predicted[inside] = predict([samples[i] for i in inside], found, fit(seen, found))
    return predicted


def held_out_errors(
    samples: Sequence[CostSample], form: CostForm = OURS, seed: int = 0
) -> dict[str, HeldOutError]:
    """By region, and of all together under ``all``."""
    errors = np.abs(predict_held_out(samples, form, seed) / _seconds(samples) - 1.0)
    regions = np.array([sample.region for sample in samples])
    found = {region: _summary(errors[regions == region]) for region in dict.fromkeys(regions)}
    return {str(region): error for region, error in found.items()} | {"all": _summary(errors)}


def feature_rows(samples: Sequence[CostSample], form: CostForm) -> Array:
    """[samples, terms] of ``CostForm.features``."""
    return np.stack([form.features(s.prefixes, s.lengths, s.num_samples) for s in samples])


def _folds(samples: Sequence[CostSample], seed: int) -> npt.NDArray[np.int64]:
    """A fold for every sample, each region spread evenly over all folds."""
    generator = np.random.default_rng(seed)
    folds = np.zeros(len(samples), dtype=np.int64)
    regions = np.array([sample.region for sample in samples])
    for region in dict.fromkeys(regions):
        inside = np.flatnonzero(regions == region)
        folds[generator.permutation(inside)] = np.arange(len(inside)) % NUM_FOLDS
    return folds


def _seconds(samples: Sequence[CostSample]) -> Array:
    return np.array([sample.seconds for sample in samples], dtype=np.float64)


def _summary(errors: Array) -> HeldOutError:
    return HeldOutError(len(errors), float(errors.mean()), float(errors.max()))
