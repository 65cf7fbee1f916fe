"""The sparse MLP of a layer: how many experts there are, and which of them a token goes to."""

from dataclasses import dataclass

from kunserve.core.cost import ExpertChoice


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of one width, of which a router chooses some for each token.

    Its logits become probabilities over all of them, and the largest are chosen. That is what
    every model served does; a softmax over the chosen ones alone is the same as ``normalised``.
    """

    number: int
    """In each layer."""
    per_token: int
    """Chosen, of equal probabilities those with the lowest numbers."""
    normalised: bool
    """Whether a token's weights are divided by their sum."""
    shared_size: int | None = None
    """Inner width of one more expert that every token goes to, by the sigmoid of a logit of its own
    (Qwen2-MoE)."""
    is_spread: bool = False
    """Whether the ranks of an instance have whole experts each (expert parallelism). Without, each
    has a part of every one."""
    num_owners: int = 1
    """Over so many ranks they are spread, of which this is one's share."""

    @property
    def held(self) -> int:
        """Experts of a layer whose weights lie together."""
        return self.number // self.num_owners

    @property
    def num_logits(self) -> int:
        """Rows of the router."""
        return self.number + (self.shared_size is not None)

    @property
    def choice(self) -> ExpertChoice:
        """Which of them batches touch."""
        return ExpertChoice(self.number, self.per_token)
