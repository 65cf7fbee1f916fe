"""A request that has not ended, as the controller knows it."""

from dataclasses import dataclass, field, replace

from kunserve.control.cluster.commands import Client
from kunserve.control.cluster.score_line import ScoreLine
from kunserve.core.ids import InstanceId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request
from kunserve.core.tokens import TokenIds


@dataclass(slots=True)
class Live:
    """One request: who waits for it, what that client has, and where it is."""

    number: int
    """Counts arrivals: the order in which requests are sent."""
    request: Request
    client: Client
    output_token_ids: list[int]
    arrived_s: float
    leader: InstanceId | None = None
    """None while it is in the backlog."""
    tokens_ahead: int = 0
    """Its tokens while its leader has it and has made no token of it yet; 0 otherwise."""
    early: dict[int, TokenOutput] = field(default_factory=dict)
    """By position: a new leader's word came before the last of the old one's."""
    is_rerun: bool = False
    """An instance died that ran it: its last words may still come."""
    returned_by: InstanceId | None = None
    """The leader in whose queue it was last, while it is on its way to another."""
    num_moves: int = 0
    scores: ScoreLine | None = None
    """Where the client asked for scores of the prompt."""

    def __post_init__(self) -> None:
        if self.request.num_to_score:
            self.scores = ScoreLine(self.request.num_to_score)

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of what its client has."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def so_far(self) -> Request:
        """The request with what its client has: a new run goes on from there."""
        request = self.request
        if self.scores is not None:
            request = replace(request, num_scored=self.scores.num_scored)
        if not self.output_token_ids and not request.output_token_ids:
            return request
        return replace(request, output_token_ids=TokenIds(self.output_token_ids))

    def is_early(self, token: TokenOutput) -> bool:
        """Whether something that comes before the token is still missing."""
        if token.position > len(self.output_token_ids):
            return True
        lacks_scores = self.scores is not None and not self.scores.is_complete
        return lacks_scores and token.token_id is not None
