"""Windows by layer, in a cluster: the tokens of transformers through a drop and a restore."""

from pathlib import Path

import pytest

from kunserve.cluster.driver.local import LocalCluster
from tests.e2e.tokens.test_engine_transitions import (
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    Answers,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.e2e.tokens.test_ranked_cluster import GREEDY, check_tokens, config_in
from tests.tiny_models import VOCAB


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["gemma3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_tokens_and_scores_through_a_drop_and_a_restore(kind: str, tmp_path: Path) -> None:
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

    answers = run(config_in(tmp_path, kind, 1, 2), VOCAB, story)
    assert set(answers.tokens) == {*early, *late}
    check_tokens(kind, answers)
