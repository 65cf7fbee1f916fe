"""One completion being produced: tokens in, text and log-probabilities out."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kunserve.core.messages import TokenOutput
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import FinishReason, Request, TokenLogprobs
from kunserve.server.api.answers.detokenize import Detokenizer
from kunserve.server.api.answers.stop import StopMatcher, StopStrings
from kunserve.server.api.parsers.message import MessagePiece
from kunserve.server.api.parsers.reader import MessageReader


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text: the part of sampling that the engine never sees."""

    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    omits_answer: bool = False
    """The client wants its prompt only: what the engine makes of it is not shown."""

    def new_matcher(self) -> StopMatcher | None:
        """What looks for the stop strings in one text, if there are any."""
        return None if self.stop is None else StopMatcher(self.stop, self.include_stop)


class TokenEntry(NamedTuple):
    """One token with what ``logprobs`` reports of it."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of an echoed prompt."""
    text_offset: int
    """Characters of output before it; negative in an echoed prompt."""


@dataclass(slots=True)
class Delta:
    """What became known of a choice since it was last taken."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    starts: bool = False
    """Whether the first token is in it. Then the prompt's scores are, where they were asked for."""
    prompt_scores: tuple[PromptScores, ...] = ()
    message: MessagePiece | None = None
    """What the text says, where answers are read; ``text`` is as the model wrote it."""
    token_ids: list[int] = field(default_factory=list)
    """All new tokens, also those that make no text."""


@dataclass(slots=True, eq=False)
class Choice:
    """Collects one request's tokens, in order and once each, and decides where its text ends."""

    index: int
    request: Request
    _detokenizer: Detokenizer
    _options: TextOptions
    _matcher: StopMatcher | None
    """Of ``_options``: each text needs one of its own."""
    _reader: MessageReader | None = None
    """Finds reasoning and calls of tools in the text; without one all is content."""
    _starts: bool = False
    _prompt_scores: tuple[PromptScores, ...] = ()
    _pieces: list[str] = field(default_factory=list)
    _entries: list[TokenEntry] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _num_characters: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt: their KV was found."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end."""

    @property
    def ended_by_text(self) -> bool:
        """Whether a stop string ended it, so that the engine does not know yet."""
        return self._matcher is not None and self._matcher.matched is not None

    @property
    def finish_name(self) -> str | None:
        """The API's ``finish_reason``."""
        reason, reader = self.finish_reason, self._reader
        if reason is FinishReason.STOP and reader is not None and reader.ends_in_calls:
            return "tool_calls"
        return None if reason is None else reason.value

    @property
    def reads_message(self) -> bool:
        """Whether deltas have a ``message``."""
        return self._reader is not None

    @property
    def num_unread(self) -> int:
        """Characters that the next ``drain`` has to read."""
        return 0 if self._reader is None else sum(map(len, self._pieces))

    def new_call_id(self) -> str:
        """An id for the next call that is found."""
        assert self._reader is not None
        return self._reader.form.new_call_id()

    def absorb(self, output: TokenOutput) -> None:
        """Take the next token (or the end). What comes after a stop string is ignored."""
        if self.finish_reason is not None:
            return
        token_id = output.token_id
        if token_id is not None:
            assert output.position == self.num_tokens, (output, self.num_tokens)
            if output.position == 0:
                self._starts = True
                self._prompt_scores = output.prompt_scores
                self.num_cached_tokens = output.num_cached_tokens
            if self._options.omits_answer:
                self.finish_reason = FinishReason.LENGTH
                return
            self._take_token(token_id, output)
        if self.finish_reason is None and output.finish_reason is not None:
            self._finish(output.finish_reason, token_id)

    def drain(self) -> Delta:
        """Everything new since the last call."""
        pieces, entries = self._pieces, self._entries
        text = "".join(pieces)
        delta = Delta(text, entries, self._starts, self._prompt_scores, token_ids=self._token_ids)
        if self._reader is not None:
            delta.message = self._reader.feed(text, self.finish_reason is not None)
        self._pieces = []
        self._token_ids = []
        self._entries = []
        self._starts = False
        self._prompt_scores = ()
        return delta

    def _take_token(self, token_id: int, output: TokenOutput) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if output.logprobs is not None:
            self._entries.append(TokenEntry(token_id, output.logprobs, self._num_characters))
        if output.finish_reason is FinishReason.STOP and not self._options.include_stop:
            return  # the stop token itself is no part of the text
        self._add_text(self._detokenizer.push(token_id))

    def _add_text(self, piece: str) -> None:
        if not piece:
            return
        self._num_characters += len(piece)
        # Stop strings do not count in the text of the first ``min_tokens`` tokens.
        matcher = self._matcher
        if matcher is None or self.num_tokens <= self.request.sampling.min_tokens:
            self._pieces.append(piece)
            return
        self._pieces.append(matcher.feed(piece))
        if matcher.matched is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = matcher.matched

    def _finish(self, reason: FinishReason, token_id: int | None) -> None:
        self._add_text(self._detokenizer.finish())
        if self.finish_reason is not None:
            return
        if self._matcher is not None:
            self._pieces.append(self._matcher.finish())
        self.finish_reason = reason
        if reason is FinishReason.STOP and token_id in self.request.sampling.stop_token_ids:
            self.stop_reason = token_id
