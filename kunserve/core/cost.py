"""What a step costs, as eight numbers of one model on one device."""

from dataclasses import dataclass
from math import log
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How many experts a sparse layer has, how many of them a token goes to, and how alike.

    The last two are fitted. Without them tokens choose independently, and arithmetic adds to
    reading.
    """

    num: int = 0
    """0: the model is dense."""
    per_token: int = 0
    alike: float = 0.0
    """Of a chunk's tokens behind its first, the share that only goes where others of it go."""
    rows_per_read: float | None = None
    """Of an expert, so many rows take the arithmetic as long as reading it takes. The shorter of
    both hides behind the longer. None: more rows than a batch has."""

    def __post_init__(self) -> None:
        """A token goes to one expert at least, and to none twice."""
        assert self.num == self.per_token == 0 or 1 <= self.per_token <= self.num, self
        assert 0.0 <= self.alike <= 1.0, self
        assert self.rows_per_read is None or self.rows_per_read > 0.0, self

    def touched(self, num_choices: float) -> float:
        """Of a layer's experts, those that so many independent choices read.

        The mean over choices that are alike. 0 for a dense model.
        """
        if not self.num:
            return 0.0
        return float(self.num * (1.0 - (1.0 - self.per_token / self.num) ** num_choices))

    def touched_by_one_more(self, num_choices: float) -> float:
        """The slope of ``touched``: what a choice adds to so many."""
        if self.per_token == self.num:
            return 0.0
        missed = 1.0 - self.per_token / self.num
        return float(-self.num * log(missed) * missed**num_choices)

    def choices(self, num_tokens: float, num_chunks: float) -> float:
        """Independent ones among the tokens of so many chunks."""
        return num_tokens - self.alike * (num_tokens - num_chunks)

    def reads(self, num_tokens: float, num_chunks: float) -> float:
        """The time of a batch's experts, in reads of one: reading, or arithmetic if longer."""
        touched = self.touched(self.choices(num_tokens, num_chunks))
        if self.rows_per_read is None:
            return touched
        return max(touched, num_tokens * self.per_token / self.rows_per_read)


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

    def seen_pairs(self, prefix: Any, count: Any) -> Any:
        """Those that are computed."""
        pairs = prefix * count + (count * count + count) / 2
        return pairs - self.hidden_pairs(prefix, count) if self.share else pairs

    def seen_context(self, prefix: Any) -> Any:
        """What is read of a prefix; of one, or elementwise."""
        return prefix - self.hidden_keys(prefix) if self.share else prefix

    def seen_keys(self, prefix: int) -> int:
        """What is read of a prefix, in whole tokens."""
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
    """eta, ours: to read one expert of every layer; 0 for a dense model."""
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
