"""Windows by layer, in a cluster: the tokens of transformers through a drop and a restore."""

from pathlib import Path

import pytest

from kunserve.cluster.local import LocalCluster
from kunserve.core.request import SamplingParams
from tests.e2e.test_engine_transitions import (
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    Answers,
    config_of,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.tiny_models import VOCAB, greedy_after, prompt_logprobs, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NUM_LAYERS = 5


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["gemma3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_tokens_and_scores_through_a_drop_and_a_restore(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, NUM_LAYERS)
    model.save_pretrained(tmp_path)
    kv_bytes = 24 * NUM_LAYERS * 2 * 8 * 2 * 32 * 4
    early, late = list(PROMPTS)[1:5], list(QUEUED)[:6]

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        for name in early:
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], GREEDY)
        await answers.have(3)
        await drop_to(cluster, 1)
        for name in late:
            answers.ask(name, QUEUED[name], QUEUED_TOKENS, GREEDY)
        await answers.have(2)
        await restore_when_it_fits(cluster)

    answers = run(config_of(str(tmp_path), "float32", 2, kv_bytes), VOCAB, story)
    assert set(answers.tokens) == {*early, *late}
    for name, tokens in answers.tokens.items():
        prompt = (PROMPTS | QUEUED)[name]
        assert len(tokens) == (NUM_TOKENS[name] if name in early else QUEUED_TOKENS)
        assert tokens == greedy_after(model, prompt, tokens), name
        scores = [row.logprob for row in answers.scores[name]]
        assert scores == pytest.approx(prompt_logprobs(model, prompt), abs=1e-3), name
