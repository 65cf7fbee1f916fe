"""What a step costs, as seven numbers of one model on one device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Seconds per unit of work, for the whole model (the paper's Eq. 1-3 and three terms of ours).

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

    def __post_init__(self) -> None:
        """No work takes negative time, and a chunk shares no more than it has."""
        values = (self.attention_s, self.token_s, self.shared_s, self.context_s, self.sample_s)
        assert min(*values, self.narrow_s) >= 0.0 and self.chunk_s >= self.shared_s, self
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
