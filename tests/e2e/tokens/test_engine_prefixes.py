"""The real engine with prompts that begin alike: tokens are the same with the prefix cache and
without it.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from kunserve.cluster.driver.local import LocalCluster
from tests.e2e.tokens.asked_cluster import GREEDY, SEEDED, Answers, config_of, run
from tests.tiny_models import VOCAB, save_tiny


def test_tokens_are_the_same_with_the_cache_and_without(tmp_path: Path) -> None:
    config = config_of(str(save_tiny(tmp_path, "llama")), "bfloat16", 1, 2 << 20, 8192, 16)
    draw = np.random.default_rng(1)
    system = draw.integers(3, VOCAB, 90).tolist()
    prompts = {f"r{i}": system + draw.integers(3, VOCAB, 5 + 9 * i).tolist() for i in range(4)}

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
    on, off = run(config, VOCAB, story), run(replace(config, scheduler=scheduler), VOCAB, story)
    assert on.tokens == off.tokens
    assert len({tuple(tokens) for tokens in off.tokens.values()}) == 5, "each prompt has its own"
    assert set(off.num_cached.values()) == {0}
    assert on.num_cached["r1"] == 80 and on.num_cached["turn"] >= 112
    assert on.num_cached["turn again"] == 0 and on.tokens["turn again"] == on.tokens["turn"]
