"""What a step costs, as eight numbers of one model on one device."""

from dataclasses import dataclass
from math import log
from typing import Any


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
    """Which share of a model's layers sees only so many tokens. Counts are means over layers."""

    share: float = 0.0
    num_tokens: int = 0

    def hidden_keys(self, prefix: Any) -> Any:
        """Tokens of a prefix that are not read; of one prefix, or elementwise."""
        beyond = prefix - self.num_tokens
        return self.share * (abs(beyond) + beyond) / 2

    def hidden_pairs(self, prefix: Any, count: Any) -> Any:
        """Pairs of ``count`` tokens behind a prefix and those up to each of them that are not
        computed; of one prefix, or elementwise.
        """
        return self._up_to(prefix + count) - self._up_to(prefix)

    def seen_keys(self, prefix: int) -> int:
        """What is read of a prefix."""
        return prefix - int(self.hidden_keys(prefix)) if self.share else prefix

    def _up_to(self, position: Any) -> Any:
        beyond = position - self.num_tokens
        beyond = (abs(beyond) + beyond) / 2
        return self.share * (beyond * beyond + beyond) / 2


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
    windows: Windows = NO_WINDOWS
    """What alpha and delta do not count."""

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
