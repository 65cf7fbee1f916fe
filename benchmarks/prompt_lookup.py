"""Would speculative decoding by prompt lookup pay on this CPU? Cost of its steps, and its hits.

    python -m benchmarks.prompt_lookup [--model smollm2-135m] [--max-tokens 160]

Nothing speculates here. First, steps of more rows are timed against steps of one row per stream:
each row is a decode of its own with its own KV, which costs a little more than rows that check one
sequence's guesses. Then the model answers prompts of several kinds greedily, and lookup is played
over its tokens: where the last two to four tokens stand earlier in prompt or answer, what followed
there is the guess. Both together give the speed-up that a perfect implementation would have.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Report, Setting
from kunserve import LLM, SamplingParams
from kunserve.core.config import ModelConfig
from kunserve_lab.profile.run import BodySettings, open_body
from kunserve_lab.profile.shapes import BatchShape
from kunserve_lab.profile.stopwatch import HostClock, Stopwatch

ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 40, 48, 72)
STREAMS = (1, 8)
GUESSES = (2, 4, 8)
LONGEST_MATCH, SHORTEST_MATCH = 4, 2
CONTEXT = 300
LOOP = 10.0
"""An answer whose runs of four tokens repeat more than so many percent is in a loop."""
REPEATS = 15
ROOT = Path(__file__).parent.parent
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain why the sky is blue to a child.",
    "Give me three tips to sleep better.",
    "Write a short poem about the sea.",
    "What is the difference between a list and a tuple in Python?",
    "How do I boil an egg?",
    "Tell me about the history of the bicycle.",
    "Why do leaves change their colour in autumn?",
)
TASKS = {
    "summary": "Summarise this text in a few sentences.\n\n{}",
    "extraction": "Copy every sentence of this text that speaks of memory.\n\n{}",
    "edit": "Repeat this text word for word, but write every number as a word.\n\n{}",
}


@dataclass(frozen=True)
class Answer:
    """One greedy answer."""

    prompt: list[int]
    tokens: list[int]


def guess(context: Sequence[int], most: int) -> list[int]:
    """What followed the latest earlier place of the longest possible run of last tokens."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        tail = context[-length:]
        for begin in range(len(context) - length - 1, -1, -1):
            if context[begin : begin + length] == tail:
                return list(context[begin + length : begin + length + most])
    return []


def steps_of(answer: Answer, most: int) -> list[tuple[int, int]]:
    """Of each step: how many tokens it would check (rows), and how many come out of it."""
    context, done, steps = [*answer.prompt], 0, []
    while done < len(answer.tokens):
        guessed = guess(context, most)
        right = 0
        left = answer.tokens[done:]
        while right < min(len(guessed), len(left) - 1) and guessed[right] == left[right]:
            right += 1
        steps.append((1 + len(guessed), right + 1))
        context += left[: right + 1]
        done += right + 1
    return steps


def speed_up(
    answers: Sequence[Answer], streams: int, most: int, cost_s: Mapping[int, float]
) -> float:
    """Time without guesses over time with them, ``streams`` answers side by side."""
    known = sorted(cost_s)

    def seconds(rows: int) -> float:
        return float(np.interp(rows, known, [cost_s[one] for one in known]))

    plain = guessing = 0.0
    for first in range(0, len(answers), streams):
        batch = answers[first : first + streams]
        longest = max(len(one.tokens) for one in batch)
        plain += sum(
            seconds(sum(len(one.tokens) > step for one in batch)) for step in range(longest)
        )
        played = [steps_of(one, most) for one in batch]
        for step in range(max(map(len, played))):
            guessing += seconds(sum(one[step][0] for one in played if len(one) > step))
    return plain / guessing


def repeats(answers: Sequence[Answer]) -> float:
    """How much answers repeat themselves: small models fall into loops, which are easy to guess."""
    runs = [
        [tuple(one.tokens[i : i + 4]) for i in range(max(0, len(one.tokens) - 3))]
        for one in answers
    ]
    return 100 * (1 - sum(len(set(one)) for one in runs) / max(1, sum(map(len, runs))))


def step_costs(model: str, report: Report) -> dict[int, float]:
    """Seconds of a step, by its rows: medians of interleaved repeats."""
    settings = BodySettings(ModelConfig(model=model), block_size=16, num_threads=1)
    stopwatch = Stopwatch(open_body(settings), HostClock(1))
    shapes = {
        rows: BatchShape("decode", (CONTEXT,) * rows, (1,) * rows, num_samples=rows)
        for rows in ROWS
    }
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for shape in shapes.values():
        stopwatch.measure(shape)
    for _ in range(REPEATS):
        for rows, shape in shapes.items():
            found[rows].append(stopwatch.measure(shape).seconds)
    cost_s = {rows: statistics.median(times) for rows, times in found.items()}
    for streams in STREAMS:
        for guesses in GUESSES:
            rows = streams * (guesses + 1)
            ratios = [a / b for a, b in zip(found[rows], found[streams], strict=True)]
            settings_of = {"streams": streams, "guesses": guesses, "context": CONTEXT}
            report.add("step", cost_s[rows] * 1e3, "ms", **settings_of)
            report.add("step against one row", statistics.median(ratios), "x", **settings_of)
            report.add("least of the repeats", min(ratios), "x", **settings_of)
            report.add("most of the repeats", max(ratios), "x", **settings_of)
    return cost_s


def documents() -> list[str]:
    """Pieces of this project's own pages, of a few hundred tokens."""
    pieces = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        text = path.read_text()
        if len(text) > 900:
            pieces.append(text[:1200])
    return pieces[:8]


def answers_of(model: str, max_tokens: int) -> dict[str, list[Answer]]:
    """Greedy answers by the kind of their prompts."""
    asked = {"chat": list(QUESTIONS)}
    asked |= {kind: [task.format(one) for one in documents()] for kind, task in TASKS.items()}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(model, num_instances=1, instance_memory="600MiB") as llm:
        answers = {}
        for kind, prompts in asked.items():
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            answers[kind] = [
                Answer(one.prompt_token_ids, one.outputs[0].token_ids)
                for one in llm.chat(chats, params)
            ]
    return answers


def main() -> None:
    """Print both figures, and what follows from them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    with Report("prompt_lookup", model=args.model, max_tokens=args.max_tokens) as report:
        cost_s = step_costs(args.model, report)
        for kind, answers in answers_of(args.model, args.max_tokens).items():
            report.add("of answers' runs of 4 that repeat", repeats(answers), "%", kind=kind)
            compare(report, kind, answers, cost_s)
            varied = [one for one in answers if repeats([one]) < LOOP]
            compare(report, f"{kind}, no loops", varied, cost_s)


def compare(
    report: Report, kind: str, answers: Sequence[Answer], cost_s: Mapping[int, float]
) -> None:
    """What lookup would find in these answers, and what it would gain."""
    report.add("answers", len(answers), "", kind=kind)
    num_tokens = sum(len(one.tokens) for one in answers)
    for guesses in GUESSES if answers else ():
        steps = [step for one in answers for step in steps_of(one, guesses)]
        guessed = sum(rows - 1 for rows, _ in steps)
        right = sum(tokens - 1 for _, tokens in steps)
        settings: dict[str, Setting] = {"kind": kind, "guesses": guesses}
        report.add("guesses that are right", 100 * right / max(1, guessed), "%", **settings)
        report.add("tokens per step", num_tokens / len(steps), "", **settings)
        for streams in STREAMS:
            batch = [answers[i % len(answers)] for i in range(max(streams, len(answers)))]
            ratio = speed_up(batch, streams, guesses, cost_s)
            report.add("predicted speed-up", ratio, "x", streams=streams, **settings)


if __name__ == "__main__":
    main()
