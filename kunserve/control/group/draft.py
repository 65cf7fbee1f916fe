"""What one sequence's tokens let guess, and how often that was right."""

from collections.abc import Sequence
from dataclasses import dataclass

from kunserve.policy.batch.prompt_lookup import PromptLookup
from kunserve.policy.batch.speculation import FIRST_RATE, learned_rate


@dataclass(slots=True, eq=False)
class Draft:
    """One sequence's lookup, and the last that it found."""

    lookup: PromptLookup
    num_known: int
    """Tokens of the sequence that ``lookup`` has been told."""
    found: tuple[int, ...] = ()
    """What may come behind those, as far as a step could ever check it."""
    rate: float = FIRST_RATE
    """Share of what was found that was right."""

    def go_on(self, came: Sequence[int]) -> None:
        """These tokens came next."""
        self.rate = learned_rate(self.rate, self.found, came)
        self.lookup.extend(came)
        self.num_known += len(came)
