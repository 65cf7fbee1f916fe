"""What a step costs, as eight numbers of one model on one device."""

from dataclasses import dataclass
from math import log


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How many experts a sparse layer has, and how many of them a token goes to."""

    num: int = 0
    """0: the model is dense."""
    per_token: int = 0

    def __post_init__(self) -> None:
        """A token goes to one expert at least, and to none twice."""
        assert self.num == self.per_token == 0 or 1 <= self.per_token <= self.num, self

    def touched(self, num_tokens: float) -> float:
        """Of a layer's experts, those that a batch reads: nobody chose the others.

        The mean over tokens that choose alike and independently. 0 for a dense model.
        """
        if not self.num:
            return 0.0
        return float(self.num * (1.0 - (1.0 - self.per_token / self.num) ** num_tokens))

    def touched_by_one_more(self, num_tokens: float) -> float:
        """The slope of ``touched``: what a token adds to a batch of so many."""
        if self.per_token == self.num:
            return 0.0
        missed = 1.0 - self.per_token / self.num
        return float(-self.num * log(missed) * missed**num_tokens)


DENSE = ExpertChoice()


@dataclass(frozen=True, slots=True)
class Windows:
    """How many of a model's layers see so many tokens only, as a share."""

    share: float = 0.0
    num_tokens: int = 0

    def hidden_pairs(self, prefix: int, count: int) -> float:
        """Of the pairs of ``count`` tokens behind a prefix and those before them, each itself
        included, what no layer computes: the mean over layers.
        """
        beyond = prefix + count - self.num_tokens
        num = max(0, min(count, beyond))
        return self.share * (num * beyond - num * (num - 1) / 2)

    def hidden_keys(self, prefix: int) -> float:
        """Of a prefix, the tokens that no layer reads: the mean over layers."""
        return self.share * max(0, prefix - self.num_tokens)


NO_WINDOWS = Windows()


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Seconds per unit of work, for the whole model (the paper's Eq. 1-3 and four terms of ours).

    ``policy.cost`` says what they multiply. Only their ratios matter to batch formation.
    """

    attention_s: float
    """alpha: per pair of a token and one that it attends to."""
    token_s: float
    """beta: per token, everything whose work does not depend on context (the FFN most of all)."""
    chunk_s: float
    """gamma: per chunk, when it runs alone."""
    shared_s: float
    """Of gamma, what chunks of one batch share: above all loading the parameters."""
    context_s: float = 0.0
    """delta, ours: per token of KV that a chunk reads, however few its own tokens are."""
    sample_s: float = 0.0
    """epsilon, ours: per sampled token (the output head, the sampler)."""
    narrow_s: float = 0.0
    """zeta, ours: of a batch of very few tokens, which pays nothing per token."""
    expert_s: float = 0.0
    """eta, ours: per expert that a layer reads, over all layers; 0 for a dense model."""
    experts: ExpertChoice = DENSE
    """What eta counts."""

    def __post_init__(self) -> None:
        """No work takes negative time, and a chunk shares no more than it has."""
        values = (self.attention_s, self.token_s, self.shared_s, self.context_s, self.sample_s)
        least = min(*values, self.narrow_s, self.expert_s)
        assert least >= 0.0 and self.chunk_s >= self.shared_s, self
        assert self.token_s > 0.0, self


@dataclass(frozen=True, slots=True)
class CostSample:
    """A batch that was measured: chunk ``i`` has ``lengths[i]`` tokens after ``prefixes[i]``."""

    region: str
    """``prefill``, ``prefix`` (chunks with one), ``decode`` or ``mixed``."""
    prefixes: tuple[int, ...]
    lengths: tuple[int, ...]
    num_samples: int
    """Tokens sampled."""
    seconds: float
