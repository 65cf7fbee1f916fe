"""Drives bodies with hand-made plans: no scheduler, one table per stage, requests in lockstep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kunserve.control.instance.body import Memory, StepOutcome, StepWork
from kunserve.core.ids import GroupId, RequestId, StepId
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams, TokenLogprobs
from kunserve.core.step import LATE, Chunk, SampledToken, ScoreRun, SequenceStart, StepPlan
from kunserve.engine.body import EngineBody

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)
Guess = Callable[[list[int]], list[int]]


@dataclass
class Sequence_:
    request_id: RequestId
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    first_step: int
    num_computed: int = 0
    is_known: bool = False
    sampled: list[SampledToken] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)


def arenas_mapped() -> set[str]:
    """This process's mappings of any arena, as the kernel lists them."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return {line for line in lines if "kunserve-arena" in line}


def prepare_all(memory: Memory, layers: LayerRange) -> str | None:
    """As an instance does it between steps, piece by piece."""
    refusal = memory.prepare(layers)
    while refusal is None and memory.is_preparing:
        refusal = memory.prepare(layers)
    return refusal


class DirectEngine:
    """Stages in layer order; a single stage is an undropped instance."""

    def __init__(self, stages: Sequence[tuple[EngineBody, LayerRange]], seed: int = 0) -> None:
        self.stages = stages
        self.blocks = stages[0][0].spec.blocks
        generator = np.random.default_rng(seed)
        self.free = []
        for body, layers in stages:
            held = body.memory.shards[0].held.num_layers
            num_runs = body.spec.units_when_holding(held) // layers.num_layers
            starts = generator.permutation(num_runs) * layers.num_layers - layers.first
            self.free.append([int(entry) for entry in starts])
        self.tables: list[dict[RequestId, list[int]]] = [{} for _ in stages]
        self.step_id = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        chunk_size: int = 1000,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        guess: Guess = lambda tokens: [],
    ) -> list[list[int]]:
        """Output tokens of each prompt; prompt i arrives i steps late, so that steps are mixed.

        ``guess`` gives what decodes check behind a sequence's known tokens.
        """
        self.guess = guess
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        sequences = [
            Sequence_(RequestId(f"{self.step_id}-{i}"), list(prompt), len(prompt), one, i)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        step = 0
        while any(len(s.tokens) - s.num_prompt < num_tokens for s in sequences):
            active = [
                s
                for s in sequences
                if s.first_step <= step and len(s.tokens) - s.num_prompt < num_tokens
            ]
            self._step(active, chunk_size)
            step += 1
        for sequence in sequences:
            self._release(sequence)
        self.last = sequences
        return [s.tokens[s.num_prompt :][:num_tokens] for s in sequences]

    def _run_stage(self, index: int, work: StepWork, hidden: Any) -> StepOutcome:
        """``hidden``: of the outcome of the stage before."""
        body, _ = self.stages[index]
        if hidden is not None:
            hidden = body.hidden_from_bytes(bytearray(body.hidden_to_bytes(hidden)))
        return body.execute(work, hidden)

    def _step(self, active: list[Sequence_], chunk_size: int) -> None:
        chunks, started, token_ids, scored, guesses = [], [], [], [], []
        for s in active:
            num = min(chunk_size, len(s.tokens) - s.num_computed)
            is_last = s.num_computed + num == len(s.tokens)
            guessed = self.guess(s.tokens) if is_last and num == 1 else []
            guesses.append(guessed)
            num_sampled = is_last + len(guessed)
            chunks.append(Chunk(s.request_id, s.num_computed, num + len(guessed), num_sampled))
            token_ids += s.tokens[s.num_computed : s.num_computed + num] + guessed
            wants_scores = s.sampling.num_prompt_logprobs is not None
            if wants_scores and s.num_computed < s.num_prompt - 1:
                end = min(s.num_computed + num, s.num_prompt - 1)
                scored.append(ScoreRun(s.request_id, s.num_computed, end))
            if not s.is_known:
                history = tuple(s.tokens) if s.sampling.needs_history or wants_scores else ()
                started.append(SequenceStart(s.request_id, s.sampling, s.num_prompt, history))
                s.is_known = True
        plan = StepPlan(
            GroupId(0),
            StepId(self.step_id),
            (),
            tuple(started),
            tuple(chunks),
            scored=tuple(scored),
        )
        self.step_id += 1
        hidden = None
        outcome = None
        for index, (_, layers) in enumerate(self.stages):
            work = StepWork(
                plan=plan,
                layers=layers,
                is_first=index == 0,
                is_last=index == len(self.stages) - 1,
                token_ids=np.array(token_ids, dtype=np.int32) if index == 0 else None,
                tables=self._tables(index, chunks),
                rows=np.arange(len(chunks), dtype=np.int32),
            )
            outcome = self._run_stage(index, work, hidden)
            hidden = outcome.hidden
        assert outcome is not None
        scores = {one.request_id: one for one in outcome.scores if one is not None}
        rows = iter(outcome.tokens)
        for s, chunk, guessed in zip(active, chunks, guesses, strict=True):
            if s.request_id in scores:
                assert scores[s.request_id].first == s.num_computed
                s.scores += scores[s.request_id].rows()
            s.num_computed += chunk.num_tokens - len(guessed)
            sampled = [next(rows) for _ in range(chunk.num_sampled)]
            assert all(token.request_id == s.request_id for token in sampled)
            for token, said in zip(sampled, [None, *guessed], strict=False):
                if said is not None:
                    if s.tokens[-1] != said:
                        break
                    s.num_computed += 1
                if token.token_id == LATE:
                    s.num_computed -= 1  # as a scheduler: a later step computes it again
                    break
                s.tokens.append(token.token_id)
                s.sampled.append(token)
        assert next(rows, None) is None

    def _tables(self, index: int, chunks: list[Chunk]) -> np.ndarray:
        table, free = self.tables[index], self.free[index]
        for chunk in chunks:
            blocks = table.setdefault(chunk.request_id, [])
            while len(blocks) < self.blocks.holding(chunk.start + chunk.num_tokens):
                blocks.append(free.pop())
        width = max(len(table[chunk.request_id]) for chunk in chunks)
        rows = np.zeros((len(chunks), width), dtype=np.int32)
        for row, chunk in zip(rows, chunks, strict=True):
            blocks = table[chunk.request_id]
            row[: len(blocks)] = blocks
        return rows

    def _release(self, sequence: Sequence_) -> None:
        for table, free in zip(self.tables, self.free, strict=True):
            free += table.pop(sequence.request_id)
        for body, _ in self.stages:
            body.forget(sequence.request_id)
