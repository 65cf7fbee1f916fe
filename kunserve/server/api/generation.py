"""The engine requests behind one HTTP request: submitted together, aborted together."""

import asyncio
import contextvars
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kunserve.cluster.api import EngineClient
from kunserve.core.errors import KunServeError
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.server.api.answers.choice import Choice

BY_THEMSELVES = (FinishReason.STOP, FinishReason.LENGTH)


class RequestClock(Protocol):
    """Counts and times one request, for the metrics."""

    def accepted(self) -> None:
        """The engine took the request. Called once, before the next two, or never at all."""
        ...

    def token(
        self, now_s: float, queued_s: float | None = None, num_cached_tokens: int = 0
    ) -> None:
        """One output token came; the first may tell how long the request queued, and how much of
        its prompt was cached.
        """
        ...

    def ended(self, reason: FinishReason, now_s: float) -> None:
        """The request is over."""
        ...


class RequestWatch(Protocol):
    """Gives requests their clocks."""

    def timing(self, request: Request) -> RequestClock:
        """The clock of a request that the engine is about to be asked for."""
        ...


class ClientGone(Exception):
    """Nobody is left to answer."""


class EngineFailed(Exception):
    """The engine could not finish a request; the client is told so."""


class Interrupted(KunServeError):
    """The server ends before the request did."""


@dataclass(slots=True)
class _Live:
    """A choice that the engine works on, or was asked for."""

    choice: Choice
    clock: RequestClock
    is_accepted: bool = False


@dataclass(slots=True, eq=False)
class Generation:
    """Runs a set of choices on the engine and hands out their progress in batches."""

    _engine: EngineClient
    choices: Sequence[Choice]
    _watch: RequestWatch
    _eager: bool
    """Whether each token is news, or only a request's end (nobody looks before)."""
    _num_choices: int
    """Of each prompt, one prompt after the other."""
    _live: dict[int, _Live] = field(default_factory=dict)
    """By the choice's index."""
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the HTTP request, for what the engine tells outside of it."""
    _pending: list[tuple[Choice, TokenOutput]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _end: Exception | None = None

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found; each prompt counts once, by its first choice."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self._num_choices])

    @property
    def lengths_by_prompt(self) -> list[list[int]]:
        """Output tokens of each choice, for the prompts whose choices all ended by themselves."""
        num = self._num_choices
        of_prompts = [self.choices[at : at + num] for at in range(0, len(self.choices), num)]
        return [
            [choice.num_tokens for choice in choices]
            for choices in of_prompts
            if all(choice.finish_reason in BY_THEMSELVES for choice in choices)
        ]

    async def start(self) -> None:
        """Submit everything, or nothing: an error takes back what was already submitted."""
        try:
            for choice in self.choices:
                live = _Live(choice, self._watch.timing(choice.request))
                self._live[choice.index] = live
                self._engine.submit(choice.request, functools.partial(self._deliver, live))
                await self._engine.admitted(choice.request.request_id)
                if not live.is_accepted:
                    self._accept(live)
        except BaseException as error:
            # Who was refused is not there. Who has left before the answer came is, or will be: the
            # engine forgets it, and nothing counts it.
            if not isinstance(error, asyncio.CancelledError):
                self._live.pop(choice.index, None)
            self._abort_all()
            raise

    def stop(self, reason: Exception) -> None:
        """Abort what still runs; whoever waits in ``advance`` gets ``reason`` raised."""
        if self._end is None:
            self._end = reason
        self._abort_all()
        self._news.set()

    def abort(self) -> None:
        """End what still runs: who waits for it keeps what there is, and is told ``abort``."""
        for live in list(self._live.values()):
            choice, reason = live.choice, FinishReason.ABORT
            self._close(choice, reason)
            end = TokenOutput(choice.request.request_id, choice.num_tokens, None, None, reason)
            self._pending.append((choice, end))
        self._news.set()

    async def advance(self) -> list[Choice]:
        """Wait for progress; the choices that moved, or an empty list when all are done."""
        while not self._pending:
            if self._end is not None:
                raise self._end
            if not self._live:
                return []
            self._news.clear()
            await self._news.wait()
        pending, self._pending = self._pending, []
        moved: dict[int, Choice] = {}
        for choice, output in pending:
            choice.absorb(output)
            moved[choice.index] = choice
        for choice in moved.values():
            if choice.finish_reason is FinishReason.ERROR:
                raise EngineFailed("The engine failed while it worked on this request.")
            if choice.ended_by_text:
                self._close(choice, FinishReason.STOP)
        return list(moved.values())

    @staticmethod
    def _accept(live: _Live) -> None:
        live.is_accepted = True
        live.clock.accepted()

    def _deliver(self, live: _Live, output: TokenOutput) -> None:
        choice, clock, now_s = live.choice, live.clock, time.monotonic()
        if not live.is_accepted:  # whoever waits for the answer has not woken up yet
            self._context.run(self._accept, live)
        if output.token_id is not None:
            queued_s = None
            if output.computed_s is not None:  # only this process's clock says when it arrived
                waited_s = now_s - choice.request.arrival_s
                queued_s = max(0.0, waited_s - output.computed_s)
            clock.token(now_s, queued_s, output.num_cached_tokens)
        if output.finish_reason is not None:
            del self._live[choice.index]
            clock.ended(output.finish_reason, now_s)
        self._pending.append((choice, output))
        if self._eager or output.finish_reason is not None:
            self._news.set()

    def _close(self, choice: Choice, reason: FinishReason) -> None:
        """End one choice before the engine does."""
        live = self._live.pop(choice.index, None)
        if live is not None:
            self._engine.abort(choice.request.request_id)
            if live.is_accepted:
                live.clock.ended(reason, time.monotonic())

    def _abort_all(self) -> None:
        for live in list(self._live.values()):
            self._close(live.choice, FinishReason.ABORT)
