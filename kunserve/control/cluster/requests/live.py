"""A request that has not ended, as the controller knows it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kunserve.control.cluster.commands import Client
from kunserve.control.cluster.requests.score_line import ScoreLine
from kunserve.core.ids import InstanceId
from kunserve.core.messages import TokenOutput
from kunserve.core.prefix import PrefixHash
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import Request
from kunserve.core.tokens import TokenIds


@dataclass(slots=True)
class Live:
    """One request: who waits for it, what that client has, and where it is.

    Tokens are for the client once and in order. Mail of two leaders comes in any order, and
    repeats are known by their position.
    """

    number: int
    """Counts arrivals."""
    request: Request
    """As its group is to run it: brought up to date when it leaves the backlog."""
    client: Client
    output_token_ids: list[int]
    arrived_s: float
    leader: InstanceId | None = None
    """None while it is in the backlog."""
    tokens_ahead: int = 0
    """Its tokens that are to be computed, while its leader has it and has made no token of it yet;
    0 otherwise."""
    names: tuple[PrefixHash, ...] = ()
    """Of its prompt's beginnings, where dispatch looks at them."""
    saved_tokens: int = 0
    """Of its prompt: those that its leader has from others, as far as is known."""
    num_held: int = 0
    """Times that it stayed in the backlog for the group that has its beginning."""
    _early: dict[int, TokenOutput] = field(default_factory=dict)
    """By position: a new leader's word came before the last of the old one's."""
    lost_by: InstanceId | None = None
    """The leader that ran it and does so no more, until it is sent anew: only until then the last
    words of that run count, because two runs may draw different tokens.
    """
    returned_by: InstanceId | None = None
    """The leader in whose queue it was last, while it is on its way to another."""
    num_moves: int = 0
    _scores: ScoreLine | None = None
    """Where the client asked for scores of the prompt."""

    def __post_init__(self) -> None:
        if self.request.num_to_score:
            self._scores = ScoreLine(self.request.num_to_score)

    @property
    def place(self) -> tuple[int, int]:
        """In the order in which requests are sent: by priority, then by arrival."""
        return self.request.priority, self.number

    @property
    def num_tokens(self) -> int:
        """Of its prompt and of what its client has."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def so_far(self) -> Request:
        """The request with what its client has: a new run goes on from there."""
        request = self.request
        if self._scores is not None:
            request = replace(request, num_scored=self._scores.num_scored)
        if not self.output_token_ids and not request.output_token_ids:
            return request
        return replace(request, output_token_ids=TokenIds(self.output_token_ids))

    def in_turn(self, token: TokenOutput) -> list[TokenOutput]:
        """What the client is to get now, in order: the token, and what has waited for it.

        Nothing while something before the token is missing, nor of a repeat.
        """
        if self._is_early(token):
            self._early[token.position] = token
            return []
        following = self._in_order(token)
        due = [] if following is None else [following]
        if self._early:
            due += self._no_longer_early()
        return due

    def take_scores(self, scores: PromptScores) -> list[TokenOutput]:
        """What has waited for these scores of the prompt."""
        if self._scores is None:
            return []
        self._scores.take(scores)
        return list(self._no_longer_early())

    def forget_early(self) -> None:
        """Whoever would have told what lies between is dead."""
        self._early.clear()
        if self._scores is not None:
            self._scores.forget_early()

    def _is_early(self, token: TokenOutput) -> bool:
        """Whether something that comes before the token is still missing."""
        if token.position > len(self.output_token_ids):
            return True
        lacks_scores = self._scores is not None and not self._scores.is_complete
        return lacks_scores and token.token_id is not None

    def _in_order(self, token: TokenOutput) -> TokenOutput | None:
        """A token, or an end without one, that is next in order; None of a repeat."""
        if token.token_id is not None:
            if token.position != len(self.output_token_ids):
                return None
            self.output_token_ids.append(token.token_id)
            if token.position == 0 and self._scores is not None:
                return self._scores.with_first(token)
        return token

    def _no_longer_early(self) -> Iterator[TokenOutput]:
        while self._early:
            token = self._early.get(len(self.output_token_ids))
            if token is None or self._is_early(token):
                return
            del self._early[token.position]
            following = self._in_order(token)
            if following is not None:
                yield following
