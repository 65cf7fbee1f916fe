"""What a microbatch costs (paper section 4.3, Eq. 1-3).

    chunk  = alpha * (p * c + (c * c + c) / 2) + beta * c + gamma             (Eq. 1)
             + delta * p + epsilon * samples                                  (ours)
    batch  = sum of its chunks - (n - 1) * gamma_shared                       (Eq. 2-3)
             + eta * reads of experts for its tokens                          (ours)

for a chunk of ``c`` tokens after ``p`` tokens of prefix. Four terms are added to the paper's: a
decode reads its whole prefix for one token, which memory bounds and alpha does not see (delta);
where layers have a window, pairs and prefixes are those that they see, the mean over layers;
the output head runs for sampled tokens only (epsilon); a batch of ``NARROW_TOKENS`` or fewer pays
zeta once instead of beta and epsilon, since reading the weights is then all of its time; a sparse
layer reads the experts that some token chose (eta), and their number grows ever slower with the
batch, until their arithmetic takes longer than reading them. That last term is of the whole batch
and of no chunk.
``docs/decisions/cost-model.md`` shows what each of them bought.
"""

from bisect import bisect_right
from dataclasses import replace
from math import sqrt
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kunserve.core.cost import DENSE, CostCoefficients
from kunserve.model.spec import ModelSpec

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
Number = TypeVar("Number", float, Array)

NARROW_TOKENS = 4
"""A batch of so many tokens takes no longer than one of a single token (our kernels' rows)."""


class Size(NamedTuple):
    """What a batch's experts depend on."""

    num_tokens: float
    num_chunks: float

    def plus(self, num_tokens: float) -> "Size":
        """With one chunk more."""
        return Size(self.num_tokens + num_tokens, self.num_chunks + 1)


def experts_cost(cost: CostCoefficients, size: Size) -> float:
    """Seconds that a batch takes for the experts that its tokens chose."""
    return cost.expert_s * cost.experts.reads(size.num_tokens, size.num_chunks)


def near_size(cost: CostCoefficients, size: Size) -> CostCoefficients:
    """The same without a term for experts, for batches of about that size.

    Exact there, and as steep. Where reading is the time, it is too much elsewhere and never too
    little, because that is concave, and this is its tangent. A dense model's coefficients are
    given back as they are.
    """
    if cost.expert_s == 0.0:
        return cost
    experts, all_s = cost.experts, experts_cost(cost, size)
    choices = experts.choices(size.num_tokens, size.num_chunks)
    if cost.expert_s * experts.touched(choices) >= all_s:
        each_s = cost.expert_s * experts.touched_by_one_more(choices)
        again_s = each_s * experts.alike
        each_s -= again_s
    else:
        assert experts.rows_per_read is not None
        each_s, again_s = cost.expert_s * experts.per_token / experts.rows_per_read, 0.0
    once_s = max(0.0, all_s - size.num_tokens * each_s - size.num_chunks * again_s)
    return replace(
        cost,
        token_s=cost.token_s + each_s,
        chunk_s=cost.chunk_s + once_s + again_s,
        shared_s=cost.shared_s + once_s,
        narrow_s=cost.narrow_s + min(size.num_tokens, NARROW_TOKENS) * each_s,
        expert_s=0.0,
        experts=DENSE,
    )


def own_cost(cost: CostCoefficients, prefix: Number, num_tokens: Number) -> Number:
    """Eq. 1 less what chunks of a batch share: seconds that a chunk adds to a batch.

    For one chunk, or elementwise for an array of them. Experts are the batch's (``experts_cost``).
    """
    pairs: Number = cost.windows.seen_pairs(prefix, num_tokens)
    return cost.attention_s * pairs + cost.token_s * num_tokens + resume_cost(cost, prefix)


def resume_cost(cost: CostCoefficients, prefix: Number) -> Number:
    """Of ``own_cost``, what does not depend on the chunk's tokens."""
    context: Number = cost.windows.seen_context(prefix)
    return cost.chunk_s - cost.shared_s + cost.context_s * context


def tokens_within(cost: CostCoefficients, prefix: float, seconds: float) -> float:
    """The inverse of ``own_cost``: tokens of a chunk that adds ``seconds``; 0 if none does."""
    left_s = seconds - resume_cost(cost, prefix)
    if left_s <= 0.0:
        return 0.0
    if cost.windows.share:
        found = tokens_within_each(cost, np.array([float(prefix)]), np.array([float(seconds)]))
        return float(found[0])
    linear_s = cost.attention_s * (prefix + 0.5) + cost.token_s
    return 2.0 * left_s / (linear_s + sqrt(linear_s * linear_s + 2.0 * cost.attention_s * left_s))


def tokens_within_each(cost: CostCoefficients, prefixes: Array, seconds: Array) -> Array:
    """``tokens_within`` of many chunks."""
    left_s: Array = np.maximum(seconds - resume_cost(cost, prefixes), 0.0)
    share, window = cost.windows.share, cost.windows.num_tokens
    if not share:
        return _tokens_of(left_s, cost.attention_s * (prefixes + 0.5) + cost.token_s, cost)
    # Until the window is full a token sees one more than the one before; then only in the layers
    # that see all.
    room = np.maximum(window - prefixes, 0.0)
    full_s = cost.attention_s * (prefixes * room + (room * room + room) / 2) + cost.token_s * room
    within_s = np.minimum(left_s, full_s)
    within = _tokens_of(within_s, cost.attention_s * (prefixes + 0.5) + cost.token_s, cost)
    wide = replace(cost, attention_s=cost.attention_s * (1.0 - share))
    begin = np.maximum(prefixes, window)
    linear_s = wide.attention_s * (begin + 0.5) + cost.attention_s * share * window + cost.token_s
    return within + _tokens_of(left_s - within_s, linear_s, wide)


def _tokens_of(left_s: Array, linear_s: Array, cost: CostCoefficients) -> Array:
    """Where ``attention_s * n * n / 2 + linear_s * n`` is ``left_s``."""
    root_s: Array = np.sqrt(linear_s * linear_s + 2.0 * cost.attention_s * left_s)
    return 2.0 * left_s / (linear_s + root_s)


def added_cost(cost: CostCoefficients, prefix: float, num_tokens: int, beside: Size) -> float:
    """Seconds that a chunk adds to a batch of that size, its experts among them."""
    experts_s = experts_cost(cost, beside.plus(num_tokens)) - experts_cost(cost, beside)
    return own_cost(cost, prefix, num_tokens) + experts_s


def tokens_beside(
    cost: CostCoefficients, prefix: float, seconds: float, beside: Size, most: int
) -> float:
    """Tokens of a chunk that adds ``seconds`` to a batch of that size; 0 if none does.

    Up to ``most``. Whole ones where there are experts, because no formula inverts that.
    """
    if cost.expert_s == 0.0:
        return min(most, tokens_within(cost, prefix, seconds))
    limit_s = seconds + experts_cost(cost, beside)

    def added_s(num_tokens: int) -> float:
        return own_cost(cost, prefix, float(num_tokens)) + experts_cost(
            cost, beside.plus(num_tokens)
        )

    return max(0, bisect_right(range(most + 1), limit_s, key=added_s) - 1)


def decode_cost(cost: CostCoefficients, num_decodes: int, num_context_tokens: int) -> float:
    """What decodes add to a batch: chunks of one token that all sample.

    Linear in their context, so that their number and their tokens are enough: of each, what is
    seen (``Windows.seen_keys``). Experts are the batch's (``experts_cost``).
    """
    each_s = cost.attention_s + cost.token_s + cost.chunk_s - cost.shared_s + cost.sample_s
    return num_decodes * each_s + num_context_tokens * (cost.attention_s + cost.context_s)


class BatchTotals(NamedTuple):
    """All that a batch's cost depends on, summed over its chunks."""

    num_chunks: int
    num_tokens: int
    num_pairs: float
    """Pairs of a token and one that it attends to."""
    num_context_tokens: float
    """Of prefix, as far as it is seen."""
    num_samples: int


def layers_cost(cost: CostCoefficients, totals: BatchTotals) -> float:
    """Eq. 2-3 but for the output head: seconds that all layers take."""
    layers_s = (
        cost.attention_s * totals.num_pairs
        + cost.token_s * totals.num_tokens
        + cost.context_s * totals.num_context_tokens
        + cost.chunk_s * totals.num_chunks
        - cost.shared_s * max(0, totals.num_chunks - 1)
    )
    if totals.num_tokens <= NARROW_TOKENS:
        layers_s += cost.narrow_s - cost.token_s * totals.num_tokens
    return layers_s + experts_cost(cost, Size(totals.num_tokens, totals.num_chunks))


def head_cost(cost: CostCoefficients, totals: BatchTotals) -> float:
    """Seconds that the output head takes."""
    return 0.0 if totals.num_tokens <= NARROW_TOKENS else cost.sample_s * totals.num_samples


def batch_cost(
    cost: CostCoefficients, prefixes: Numbers, lengths: Numbers, samples: Numbers = 0
) -> float:
    """Eq. 3: seconds that a microbatch of these chunks takes; 0 for none.

    ``samples`` is 1 where a token is sampled.
    """
    p, c = np.asarray(prefixes, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    if c.size == 0:
        return 0.0
    totals = BatchTotals(
        num_chunks=c.size,
        num_tokens=int(c.sum()),
        num_pairs=float(np.sum(cost.windows.seen_pairs(p, c))),
        num_context_tokens=float(np.sum(cost.windows.seen_context(p))),
        num_samples=int(np.sum(np.broadcast_to(np.asarray(samples), c.shape))),
    )
    return layers_cost(cost, totals) + head_cost(cost, totals)


MATRIX_FLOPS = 200e9
ATTENTION_FLOPS = 115e9
MEMORY_BYTES_PER_S = 17e9


def assumed_cost(model: ModelSpec, layer_bytes: float | None = None) -> CostCoefficients:
    """Coefficients for a model that nobody has profiled: arithmetic over assumed rates.

    ``layer_bytes`` is what a layer's weights take in memory, where they stay quantised.

    The rates are those of one core of a server CPU running our kernels in bfloat16. Formation
    needs ratios only, and those depend on the model's shape more than on the device.
    """
    experts = DENSE if model.experts is None else model.experts.choice
    expert_params = 0 if model.experts is None else model.mlp_params
    idle_params = (experts.num - experts.per_token) * expert_params
    layers_params = model.num_layers * (model.layer_params - idle_params)
    read_bytes = model.layer_bytes if layer_bytes is None else layer_bytes
    expert_bytes = read_bytes * expert_params / model.layer_params
    always_bytes = read_bytes - experts.num * expert_bytes
    head_params = model.vocab_size * model.hidden_size
    per_pair = 4.0 * model.num_layers * model.q_size
    kv_bytes = model.block_bytes(1)
    shared_s = model.num_layers * always_bytes / MEMORY_BYTES_PER_S
    return CostCoefficients(
        attention_s=per_pair / ATTENTION_FLOPS,
        token_s=2.0 * layers_params / MATRIX_FLOPS,
        chunk_s=shared_s,
        shared_s=shared_s,
        context_s=kv_bytes / MEMORY_BYTES_PER_S,
        sample_s=2.0 * head_params / MATRIX_FLOPS,
        expert_s=model.num_layers * expert_bytes / MEMORY_BYTES_PER_S,
        experts=experts,
        windows=model.windows,
    )
