"""Log-probabilities of a prompt's tokens, from the hidden states of its chunks.

Logits of all rows of a chunk would take hundreds of megabytes. They are computed in panels of
``LOGIT_ROWS`` rows in the decoder's own buffer, and only what was asked for is kept of each row.
"""

import logging

import numpy as np
import torch

from kunserve.core.ids import RequestId
from kunserve.core.prompt_scores import PromptScores, pack_scores
from kunserve.core.request import TokenLogprobs
from kunserve.core.step import ScoreRun, SequenceStart, StepPlan
from kunserve.core.tokens import TokenIds
from kunserve.engine.cpu.decoder import LOGIT_ROWS, StepBatch, StepDecoder
from kunserve.engine.sampling.distribution import token_logprobs

logger = logging.getLogger(__name__)


class PromptScorer:
    """Lives where the output head is. One entry per running request that asked."""

    def __init__(self, decoder: StepDecoder) -> None:
        self._decoder = decoder
        self._prompts: dict[RequestId, tuple[TokenIds, int]] = {}
        """Tokens, and alternatives wanted of each."""

    def start(self, start: SequenceStart) -> None:
        """Know a request, if its prompt is to be scored."""
        num_top = start.sampling.num_prompt_logprobs
        if num_top is not None and start.token_ids:
            self._prompts[start.request_id] = (start.token_ids, num_top)

    def forget(self, request_id: RequestId) -> None:
        """The request ended; unknown ones are no mistake."""
        self._prompts.pop(request_id, None)

    def score(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor
    ) -> tuple[PromptScores | None, ...]:
        """The plan's scores; None for a request whose logits cannot be used."""
        row_of = {}
        for chunk, first_row in zip(plan.chunks, batch.q_starts.tolist(), strict=False):
            row_of[chunk.request_id] = first_row - chunk.start
        return tuple(self._score(run, row_of[run.request_id], hidden) for run in plan.scored)

    def _score(self, run: ScoreRun, offset: int, hidden: torch.Tensor) -> PromptScores | None:
        """``offset`` and a position in the prompt make a row of ``hidden``."""
        token_ids, num_top = self._prompts[run.request_id]
        scores: list[TokenLogprobs] = []
        for first in range(run.first, run.end, LOGIT_ROWS):
            end = min(run.end, first + LOGIT_ROWS)
            rows = np.arange(first + offset, end + offset)
            logits = self._decoder.logits_of(rows, hidden).cpu().numpy()
            # A row's largest logit tells of the whole row, because a NaN counts as the largest.
            if not np.isfinite(logits.max(axis=1)).all():
                logger.error("no finite largest logit in the prompt, request=%s ends", run[0])
                return None
            targets = token_ids[first + 1 : end + 1]
            scores += [
                token_logprobs(row, target, num_top)
                for row, target in zip(logits, targets, strict=True)
            ]
        return pack_scores(run.request_id, run.first, num_top, scores)
