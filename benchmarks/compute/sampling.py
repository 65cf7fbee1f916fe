"""Choosing a step's tokens: all rows at once where logits lie, beside row by row on the host.

    python -m benchmarks.compute.sampling [--rows 1 32 256] [--rounds 7]
    python -m benchmarks.compute.sampling --device cuda

Qwen2.5's vocabulary, and requests of several kinds that all rows are of; "Qwen's own" is what the
generation config of Qwen2.5-Instruct asks for. ``host`` copies the logits to the host, whose
sampler looks at one row after the other: so were rows with a penalty, a ban or log-probabilities
sampled. ``at once`` is the sampler of ``--device cuda``. Both take turns, and the median of each
counts. Without a GPU both compute on the CPU's cores, with one thread. ``calls`` are operations of
torch, which on a GPU cost the host about 5 us each, and do not grow with the rows.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import Report, Setting
from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.sampling.sampler import Sampler
from kunserve_extras.torch_body.sampler import TorchSampler

VOCAB = 151_936
CONTEXT = 600
"""Tokens of each prompt, most of them different ones."""
KINDS = {
    "greedy": SamplingParams(512, temperature=0.0),
    "temperature": SamplingParams(512),
    "top_p 0.95": SamplingParams(512, top_p=0.95),
    "Qwen's own": SamplingParams(512, 0.7, 0.8, 20, repetition_penalty=1.05),
    "penalties": SamplingParams(512, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2),
    "bias, 5 logprobs": SamplingParams(512, top_k=50, logit_bias=((9, 1.0),), num_logprobs=5),
}


def logits_like(num_rows: int) -> torch.Tensor:
    """As peaked as those of a model: a few dozen tokens have nearly all of the probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, VOCAB, generator=generator) * 2
    likely = torch.randint(VOCAB, (num_rows, 64), generator=generator)
    logits.scatter_(1, likely, 12 + 3 * torch.randn(num_rows, 64, generator=generator))
    return logits.to(torch.bfloat16).to(torch.float32)


class Steps:
    """One sampler, and requests that all ask for the same."""

    def __init__(self, sampler: Sampler, sampling: SamplingParams, num_rows: int) -> None:
        self._sampler = sampler
        self._ids = [RequestId(str(row)) for row in range(num_rows)]
        self._position = 0
        prompt = torch.randint(VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(1))
        for number, one in enumerate(self._ids):
            tokens = TokenIds((prompt + number).remainder(VOCAB).tolist())
            sampler.start(SequenceStart(one, sampling, CONTEXT, tokens))

    def run(self, logits: torch.Tensor) -> Sequence[int | None]:
        """The next tokens. The logits are overwritten."""
        positions = [self._position] * len(self._ids)
        self._position += 1
        return [one.token_id for one in self._sampler.sample(logits, self._ids, positions)]


class Calls(TorchDispatchMode):  # type: ignore[misc]
    """How many operations are asked for, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_calls += not func.is_view
        return func(*args, **(kwargs or {}))


def seconds(work: Callable[[], object]) -> float:
    """Until the tokens are known."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _run(steps: Steps, logits: torch.Tensor, tokens: list[Sequence[int | None]]) -> None:
    tokens.append(steps.run(logits))


def _run_on_host(steps: Steps, logits: torch.Tensor, tokens: list[Sequence[int | None]]) -> None:
    _run(steps, logits.cpu(), tokens)


def compare(report: Report, kind: str, num_rows: int, rounds: int, device: torch.device) -> None:
    """Both ways in turns, over copies of the same logits."""
    fresh = logits_like(num_rows).to(device)
    host = Steps(Sampler((2,), VOCAB), KINDS[kind], num_rows)
    at_once = Steps(TorchSampler((2,), VOCAB, device=device), KINDS[kind], num_rows)
    took: dict[str, list[float]] = {"host": [], "at once": []}
    num_equal = num_calls = 0
    for number in range(rounds + 2):
        here, there = fresh.clone(), fresh.clone()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        tokens: list[Sequence[int | None]] = []
        host_s = seconds(partial(_run_on_host, host, here, tokens))
        at_once_s = seconds(partial(_run, at_once, there, tokens))
        if number >= 2:  # the first ones warm up
            took["host"].append(host_s)
            took["at once"].append(at_once_s)
        num_equal += sum(a == b for a, b in zip(*tokens, strict=True))
    with Calls() as calls:
        at_once.run(fresh.clone())
    num_calls = calls.num_calls - 1
    medians = {name: sorted(some)[len(some) // 2] for name, some in took.items()}
    where: dict[str, Setting] = {"kind": kind, "rows": num_rows}
    for name, median_s in medians.items():
        report.add(name, median_s * 1e3, "ms", **where)
    report.add("host / at once", medians["host"] / medians["at once"], "x", **where)
    report.add("calls", num_calls, "", **where)
    report.add("equal tokens", num_equal / (num_rows * (rounds + 2)), "", **where)


def main() -> None:
    """Every kind, with each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    with Report("sampling", device=arguments.device, vocabulary=VOCAB) as report:
        for kind in arguments.kinds:
            for num_rows in arguments.rows:
                compare(report, kind, num_rows, arguments.rounds, device)


if __name__ == "__main__":
    main()
