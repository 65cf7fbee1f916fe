"""A prompt whose logits cannot be used ends alone, and only panels of logits are asked for."""

from types import SimpleNamespace

import numpy as np
import torch

from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.request import SamplingParams
from kunserve.core.step import Chunk, ScoreRun, SequenceStart, StepPlan
from kunserve.core.tokens import TokenIds
from kunserve.engine.cpu.decoder import LOGIT_ROWS
from kunserve.engine.sampling.prompt_scorer import PromptScorer

VOCAB = 300


class Decoder:
    """Its logits are the hidden states."""

    def __init__(self) -> None:
        self.panels: list[int] = []

    def logits_of(self, which: np.ndarray, hidden: torch.Tensor) -> torch.Tensor:
        self.panels.append(len(which))
        return hidden[torch.from_numpy(which)]


def test_panels_and_broken_rows() -> None:
    decoder = Decoder()
    scorer = PromptScorer(decoder)  # type: ignore[arg-type]
    length = LOGIT_ROWS + 9
    prompt = TokenIds(range(length))
    names = [RequestId("good"), RequestId("bad")]
    for name in names:
        sampling = SamplingParams(5, num_prompt_logprobs=1)
        scorer.start(SequenceStart(name, sampling, length, prompt))
    hidden = torch.zeros(2 * (length - 4), VOCAB)
    hidden[length - 4 + 7, 3] = float("nan")
    plan = StepPlan(
        GroupId(0),
        StepId(0),
        (),
        (),
        tuple(Chunk(name, 4, length - 4, True) for name in names),
        scored=tuple(ScoreRun(name, 5, length - 1) for name in names),
    )
    batch = SimpleNamespace(q_starts=np.array([0, length - 4, 2 * (length - 4)]))
    good, bad = scorer.score(plan, batch, hidden)  # type: ignore[arg-type]
    assert bad is None and good is not None
    assert (good.first, good.end) == (5, length - 1)
    for row in good.rows():
        assert np.isclose(row.logprob, -np.log(VOCAB)) and row.rank == 1
    assert max(decoder.panels) == LOGIT_ROWS
