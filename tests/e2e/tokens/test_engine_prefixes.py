"""The real engine with prompts that begin alike: tokens are those of transformers, with the prefix
cache and without it, and through a drop and a restore in the middle.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.request import SamplingParams
from tests.e2e.tokens.test_engine_transitions import (
    SEEDED,
    Answers,
    config_of,
    drop_to,
    restore_when_it_fits,
    run,
)
from tests.tiny_models import VOCAB, greedy_after, tiny_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SYSTEM = np.random.default_rng(5).integers(3, VOCAB, 43).tolist()
"""Five blocks of 8, and a part of one."""
QUESTIONS = {
    f"r{i}": SYSTEM + np.random.default_rng(i).integers(3, VOCAB, 3 + 5 * (i % 4)).tolist()
    for i in range(8)
}


@pytest.mark.timeout(300)  # a busy machine
def test_a_system_prompt_is_shared_through_a_drop_and_a_restore(tmp_path: Path) -> None:
    model = tiny_model("qwen2", 5)
    model.save_pretrained(tmp_path)
    kv_bytes = 48 * 5 * 2 * 8 * 2 * 32 * 4
    config = config_of(str(tmp_path), "float32", 2, kv_bytes)
    names = list(QUESTIONS)

    def ask(answers: Answers, some: list[str]) -> None:
        for name in some:
            answers.ask(name, QUESTIONS[name], 14, GREEDY, wants_scores=False)

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        ask(answers, names[:3])
        await answers.have(4)
        ask(answers, names[3:6])
        await answers.have(1)
        await drop_to(cluster, 1)
        ask(answers, names[6:])
        await answers.have(4)
        await restore_when_it_fits(cluster)

    answers = run(config, VOCAB, story)
    for name, prompt in QUESTIONS.items():
        assert len(answers.tokens[name]) == 14
        assert answers.tokens[name] == greedy_after(model, prompt, answers.tokens[name]), name
    assert max(answers.num_cached.values()) >= 40, "nobody shared the system prompt"


def test_smollm2_says_the_same_with_the_cache_and_without() -> None:
    config = config_of("smollm2-135m", "bfloat16", 1, 64 << 20, 256 * 1024, 16)
    draw = np.random.default_rng(1)
    system = draw.integers(100, 30000, 90).tolist()
    prompts = {f"r{i}": system + draw.integers(100, 30000, 5 + 9 * i).tolist() for i in range(4)}

    async def story(cluster: LocalCluster, answers: Answers) -> None:
        answers.ask("first", prompts["r0"], 24, GREEDY, wants_scores=False)
        await answers.all()
        for i, (name, prompt) in enumerate(prompts.items()):
            answers.ask(name, prompt, 24, SEEDED if i % 2 else GREEDY, wants_scores=False)
        await answers.all()
        turn = [*prompts["r0"], *answers.tokens["r0"], *prompts["r1"][-9:]]
        answers.ask("turn", turn, 24, GREEDY, wants_scores=False)
        await answers.all()
        await cluster.reset_prefix_cache()
        answers.ask("turn again", turn, 24, GREEDY, wants_scores=False)

    scheduler = replace(config.scheduler, enable_prefix_caching=False)
    on, off = run(config, 49152, story), run(replace(config, scheduler=scheduler), 49152, story)
    assert on.tokens == off.tokens
    assert set(off.num_cached.values()) == {0}
    assert on.num_cached["r1"] == 80 and on.num_cached["turn"] >= 112
    assert on.num_cached["turn again"] == 0 and on.tokens["turn again"] == on.tokens["turn"]
