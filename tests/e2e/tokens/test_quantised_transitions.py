"""Quantised weights through drops, exchanges and restores: the tokens of an undisturbed run."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Quant

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.request import SamplingParams
from tests.e2e.tokens.test_engine_transitions import (
    NUM_TOKENS,
    PROMPTS,
    QUEUED,
    QUEUED_TOKENS,
    SEEDED,
    Answers,
    config_of,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.tiny_gguf import write_gguf
from tests.tiny_models import VOCAB, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_1])
def test_quantised_weights_say_the_same_through_a_drop_and_a_restore(
    quant: Quant, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", 4), "llama", quant)
    # Four layers: of five, which are small, a drop would add no block.
    kv_bytes = 24 * 4 * 2 * 8 * 2 * 32 * 2
    early, late = list(PROMPTS)[:4], list(QUEUED)[:6]

    def ask_early(answers: Answers) -> None:
        for i, name in enumerate(early):
            answers.ask(name, PROMPTS[name], NUM_TOKENS[name], SEEDED if i % 2 else GREEDY)

    def ask_late(answers: Answers) -> None:
        for name in late:
            answers.ask(name, QUEUED[name], QUEUED_TOKENS, GREEDY)

    async def undisturbed(cluster: LocalCluster, answers: Answers) -> None:
        ask_early(answers)
        ask_late(answers)

    async def disturbed(cluster: LocalCluster, answers: Answers) -> None:
        ask_early(answers)
        await answers.have(3)
        await drop_to(cluster, 1)
        ask_late(answers)
        await answers.have(2)
        await restore_when_it_fits(cluster)

    config = config_of(str(path), "bfloat16", 2, kv_bytes, granule_bytes=4096)
    config = replace(config, model=replace(config.model, quantization="gguf"))
    one, other = run(config, VOCAB, disturbed), run(config, VOCAB, undisturbed)
    assert one.tokens == other.tokens
    assert one.scores == other.scores
