"""The real engine with prompts that begin alike: tokens are the same with the prefix cache and
without it.
"""

from dataclasses import replace

import numpy as np

from kunserve.cluster.driver.local import LocalCluster
from tests.e2e.tokens.asked_cluster import GREEDY, SEEDED, Answers, config_of, run


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
