"""Cost models to be fitted to measured steps: ours, the paper's, and those it criticises."""

from dataclasses import dataclass, replace

import numpy as np

from kunserve.core.cost import DENSE, NO_WINDOWS, CostCoefficients, ExpertChoice, Windows
from kunserve.policy.batch.cost import NARROW_TOKENS, Array, Numbers


@dataclass(frozen=True, slots=True)
class CostForm:
    """Which of a chunk's work a cost model sees."""

    name: str
    prefix_attention: bool = True
    self_attention: bool = True
    added_terms: bool = True
    """delta, epsilon, zeta and eta."""
    experts: ExpertChoice = DENSE
    """Of the model that is fitted; as is the next."""
    windows: Windows = NO_WINDOWS
    """Only a form that sees all pairs has any."""

    def pairs(self, prefixes: Numbers, lengths: Numbers) -> Array:
        """Pairs of a token and one that it attends to, as far as the form sees them."""
        p, c = np.asarray(prefixes, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
        if self.prefix_attention and self.self_attention:
            pairs: Array = self.windows.seen_pairs(p, c)
            return pairs
        pairs = np.zeros(np.broadcast(p, c).shape)
        if self.prefix_attention:
            pairs += p * c
        if self.self_attention:
            pairs += (c * c + c) / 2
        return pairs

    def features(self, prefixes: Numbers, lengths: Numbers, num_samples: int) -> Array:
        """One batch as [pairs, tokens, chunks, 1, context tokens, samples, is narrow, experts].

        Cost is linear in it.
        The fourth is what the batch pays once: ``(n * gamma) - (n - 1) * gamma_shared`` is
        ``gamma_shared + n * (gamma - gamma_shared)``.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        pairs, num_tokens = float(self.pairs(prefixes, lengths).sum()), float(lengths.sum())
        added = (0.0, 0.0, 0.0, 0.0)
        touched = self.experts.reads(num_tokens, float(lengths.size))
        context = float(np.sum(self.windows.seen_context(np.asarray(prefixes, dtype=np.float64))))
        if self.added_terms and num_tokens <= NARROW_TOKENS:
            num_tokens, added = 0.0, (context, 0.0, 1.0, touched)
        elif self.added_terms:
            added = (context, float(num_samples), 0.0, touched)
        return np.array([pairs, num_tokens, float(lengths.size), 1.0, *added])


OURS = CostForm("kunserve")
PAPER = CostForm("Eq. 1-3", added_terms=False)
NANOFLOW = CostForm("no self-attention (NanoFlow)", self_attention=False, added_terms=False)
DISTSERVE = CostForm("no prefix attention (DistServe)", prefix_attention=False, added_terms=False)
TOKENS = CostForm("no attention", prefix_attention=False, self_attention=False, added_terms=False)
"""What balancing by token count assumes."""
FORMS = (OURS, PAPER, NANOFLOW, DISTSERVE, TOKENS)


def forms_for(experts: ExpertChoice, windows: Windows = NO_WINDOWS) -> tuple[CostForm, ...]:
    """``FORMS`` for a model of such experts and windows, ours first; the others do not see them."""
    ours, *others = (replace(form, experts=experts) for form in FORMS)
    return (replace(ours, windows=windows), *others)


def as_vector(cost: CostCoefficients) -> Array:
    """The coefficients in the order of ``CostForm.features``."""
    return np.array(
        [
            cost.attention_s,
            cost.token_s,
            cost.chunk_s - cost.shared_s,
            cost.shared_s,
            cost.context_s,
            cost.sample_s,
            cost.narrow_s,
            cost.expert_s,
        ]
    )


def from_vector(
    vector: Array, experts: ExpertChoice = DENSE, windows: Windows = NO_WINDOWS
) -> CostCoefficients:
    """The inverse of ``as_vector``, for a model of such experts and windows."""
    attention_s, token_s, own_s, shared_s, context_s, sample_s, narrow_s, expert_s = vector.tolist()
    chunk_s = own_s + shared_s
    return CostCoefficients(
        attention_s,
        token_s,
        chunk_s,
        shared_s,
        context_s,
        sample_s,
        narrow_s,
        expert_s,
        experts,
        windows,
    )
