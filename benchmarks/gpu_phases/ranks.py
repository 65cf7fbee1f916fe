"""P3b: instances of two ranks give the tokens of transformers through a drop and a restore.

With as many GPUs as an instance has ranks their sums go through NCCL. With fewer, ranks share a
GPU, which NCCL refuses, and sums go through host memory: right, and slow.
"""

import itertools
import tempfile
from dataclasses import replace
from functools import partial

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.identity import (
    VOCAB,
    answers_of,
    check_float32,
    config_of,
    expected_tokens,
    make_model,
    make_prompts,
)
from benchmarks.gpu_phases.live import Asker, with_cluster
from benchmarks.gpu_phases.machine import Machine, median
from benchmarks.report import Report
from kunserve.core.config import ClusterConfig

_NUM_RANKS = 2
_TIMED_TOKENS = 100


def run(machine: Machine, report: Report) -> None:
    """The same model as P3's, in float32; and what a token takes with one rank and with two."""
    is_apart = machine.is_real and machine.driver().num_devices >= _NUM_RANKS
    by = "nccl" if is_apart else "gloo"
    report.add("fact", None, "", subject="sums over ranks", text=by)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(machine.is_real)
        model.save_pretrained(folder)

        def tokens() -> None:
            prompts = make_prompts()
            expected = {name: expected_tokens(model, prompt) for name, prompt in prompts.items()}
            answers = answers_of(machine, report, folder, prompts, "float32", _NUM_RANKS)
            differ = check_float32(report, answers, expected)
            assert not differ, f"float32 tokens differ: {differ}"

        def token(num_ranks: int) -> None:
            seconds = _token_s(machine, folder, num_ranks)
            report.add("a token", seconds * 1e3, "ms", ranks=num_ranks, by=by)

        machine.do(
            Part("tokens", tokens),
            *(Part(f"a token, ranks {n}", partial(token, n)) for n in (1, _NUM_RANKS)),
        )


def _token_s(machine: Machine, folder: str, num_ranks: int) -> float:
    """Of one stream alone: the median."""
    config = config_of(machine, folder, "float32", num_ranks)
    times: list[float] = []

    async def story(asker: Asker) -> None:
        asker.ask("one", [5, 6, 7], _TIMED_TOKENS)
        await asker.done()
        times.extend(asker.answers["one"].times_s)

    with_cluster(replace(config, cluster=ClusterConfig(num_instances=1)), VOCAB, story)
    return median([after - before for before, after in itertools.pairwise(times)])
