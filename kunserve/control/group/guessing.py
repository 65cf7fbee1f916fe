"""Speculative decoding: which guessed tokens of a group's sequences the next step checks.

A guess is right if it is the token that is sampled before it, and that token depends on its
request and position alone. So outputs are the same with and without guesses.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from kunserve.control.group.draft import Draft
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.sequence import Sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import RequestId
from kunserve.core.plan import Measured
from kunserve.core.step import SampledToken
from kunserve.policy.batch.prompt_lookup import PromptLookup
from kunserve.policy.batch.speculation import MOST_DECODES, Decode, choose_num_guesses

Guesses: TypeAlias = dict[RequestId, tuple[int, ...]]
"""Of the sequences in a step that have any."""
NO_GUESSES: Guesses = {}
MOST_TOKENS = 32_768
"""Of a sequence's known tokens that are looked through, the last ones: it takes 10 ms once."""


class Guessing:
    """Looks at sequences that decode. What it remembers of one is in the sequence's ``draft``."""

    def __init__(self, config: SchedulerConfig, measured: Measured, block_size: int) -> None:
        self._config = config.speculative_config
        self._cost = measured.cost
        self._windows = measured.windows
        self._most_rows = config.max_num_batched_tokens
        self._block_size = block_size

    def choose(self, chosen: list[tuple[Sequence, int]]) -> Guesses:
        """Guesses for the step of these chunks; none where it has prompts or is large.

        No guess lies in a block that its sequence does not have anyway: where one is wrong, only
        places in the last block are written again.
        """
        if self._config is None or not 0 < len(chosen) <= MOST_DECODES:
            return NO_GUESSES
        for seq, _ in chosen:
            if seq.num_left != 1 or seq.num_computed < seq.num_prompt:
                return NO_GUESSES
        found = [self._look_up(seq) for seq, _ in chosen]
        if not any(found):
            return NO_GUESSES
        decodes = [
            Decode(
                self._windows.seen_keys(seq.num_computed),
                len(guesses),
                0.0 if seq.draft is None else seq.draft.rate,
            )
            for (seq, _), guesses in zip(chosen, found, strict=True)
        ]
        counts = choose_num_guesses(decodes, self._most_rows, self._cost)
        return {
            seq.request_id: guesses[:count]
            for (seq, _), guesses, count in zip(chosen, found, counts, strict=True)
            if count
        }

    def _look_up(self, seq: Sequence) -> tuple[int, ...]:
        """What may follow the sequence's known tokens, as far as it has room for it.

        Nothing where sampling depends on earlier outputs: the stage that samples learns of them
        one by one.
        """
        config, num_tokens = self._config, seq.num_tokens
        if config is None or seq.request.sampling.needs_history:
            return ()
        draft = seq.draft
        if draft is None:
            lookup = PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
            lookup.extend(seq.known_tokens(max(0, num_tokens - MOST_TOKENS), num_tokens))
            draft = Draft(lookup, num_tokens)
            seq.keep_draft(draft)
        else:
            draft.go_on(seq.known_tokens(draft.num_known, num_tokens))
        most = min(config.num_speculative_tokens, seq.max_total_tokens - num_tokens - 1)
        draft.found = draft.lookup.find(most)
        return draft.found[: -num_tokens % self._block_size]


def keep_right(
    tokens: Iterable[SampledToken],
    sampling: Iterable[Sequence | None],
    guesses: Guesses,
    totals: SchedulerTotals,
) -> Iterator[tuple[SampledToken, Sequence | None]]:
    """A step's tokens that are their request's, and whose each is.

    Behind a token that is not the one guessed everything was computed from a wrong one.
    """
    rows = iter(tokens)
    for seq in sampling:
        token = next(rows)
        yield token, seq
        guessed = guesses.get(token.request_id, ())
        num_right, is_right = 0, True
        for guess in guessed:
            is_right = is_right and token.token_id == guess
            token = next(rows)
            if is_right:
                num_right += 1
                yield token, seq
        if guessed and seq is not None:
            totals.note_guesses(len(guessed), num_right)
    assert next(rows, None) is None, "tokens that nobody sampled"
