"""What a client of an in-process cluster gets."""

from dataclasses import dataclass, field

from kunserve.core.messages import TokenOutput
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import FinishReason, Request


@dataclass(slots=True)
class Account:
    """What became of a request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    prompt_scores: tuple[PromptScores, ...] = ()
    end: FinishReason | None = None
    is_cancelled: bool = False

    def take(self, token: TokenOutput) -> None:
        """The client's part: tokens come in order, each once, and none after the end."""
        assert self.end is None and not self.is_cancelled, token
        if token.token_id is not None:
            assert token.position == len(self.token_ids), token
            self.token_ids.append(token.token_id)
            self.prompt_scores += token.prompt_scores
        self.end = token.finish_reason
