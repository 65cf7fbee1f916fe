"""The scores of one request's prompt as they come to the controller: in any order, some twice."""

from kunserve.core.messages import TokenOutput
from kunserve.core.prompt_scores import PromptScores


class ScoreLine:
    """Owner of one prompt's scores until its first token goes to the client with them."""

    def __init__(self, num_to_score: int) -> None:
        self._num_to_score = num_to_score
        self._pieces: list[PromptScores] = []
        self._early: dict[int, PromptScores] = {}
        """By first index: a new leader's word came before the last of the old one's."""
        self.num_scored = 0
        """Scores that are here without a gap: a re-run computes the others."""

    @property
    def is_complete(self) -> bool:
        """Whether the first token may go to the client."""
        return self.num_scored >= self._num_to_score

    def take(self, scores: PromptScores) -> None:
        """Keep what is new of them, and what has waited for them."""
        if scores.first > self.num_scored:
            self._early[scores.first] = scores
            return
        self._append(scores)
        while waiting := [first for first in self._early if first <= self.num_scored]:
            self._append(self._early.pop(min(waiting)))

    def forget_early(self) -> None:
        """Whoever would have told what lies between is dead."""
        self._early.clear()

    def with_first(self, token: TokenOutput) -> TokenOutput:
        """The first token with all scores, which are not kept any longer."""
        pieces, self._pieces = tuple(self._pieces), []
        return token._replace(prompt_scores=pieces)

    def _append(self, scores: PromptScores) -> None:
        if scores.end > self.num_scored:
            self._pieces.append(scores.since(self.num_scored))
            self.num_scored = scores.end
