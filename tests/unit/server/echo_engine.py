"""An ``EngineClient`` with no model: repeats the prompt, one token per tick, as told by a test."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from kunserve.cluster.api import Deliver, ServingLimits, Vitals
from kunserve.core.errors import InvalidRequest, Unavailable
from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LoadReport
from kunserve.core.messages import TokenOutput
from kunserve.core.prompt_scores import PromptScores, pack_scores
from kunserve.core.request import FinishReason, Request, TokenLogprobs
from kunserve.core.snapshots import (
    ClusterSize,
    ClusterState,
    InstanceSnapshot,
    Kind,
    Outcome,
    TransitionRecord,
)
from tests.specs import instance_spec

LAYERS = 4
T = TypeVar("T")
Script = Callable[[Request], Sequence[int]]


def echo(request: Request) -> Sequence[int]:
    """The default script: the prompt over and over."""
    prompt = request.prompt_token_ids
    return [prompt[position % len(prompt)] for position in range(request.sampling.max_tokens)]


def prompt_scores(request: Request) -> tuple[PromptScores, ...]:
    """In two pieces: token ``p`` has log-probability ``-p`` and rank 2, behind token 0."""
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None or request.num_to_score == 0:
        return ()
    top = tuple((one, -0.25 - one) for one in range(num_top))
    rows = [TokenLogprobs(-float(p), 2, top) for p in range(1, request.num_to_score + 1)]
    half = len(rows) // 2
    return (
        pack_scores(request.request_id, 0, num_top, rows[:half]),
        pack_scores(request.request_id, half, num_top, rows[half:]),
    )


def group_of(group_id: int, *stages: tuple[int, int, int]) -> GroupLayout:
    return GroupLayout(
        GroupId(group_id),
        tuple(Stage(InstanceId(one), LayerRange(first, end)) for one, first, end in stages),
    )


def idle_load(group_id: int) -> LoadReport:
    return LoadReport(GroupId(group_id), sequence_number=1, capacity_blocks=100)


def instance_state(instance_id: int, first: int = 0, end: int = LAYERS) -> InstanceSnapshot:
    spec = instance_spec(
        instance_id,
        LAYERS,
        400,
        unit_bytes=1024,
        layer_bytes=4096,
        granule_bytes=512,
        memory_bytes=1 << 20,
    )
    return InstanceSnapshot(spec, True, LayerRange(first, end), 400)


def idle_state() -> ClusterState:
    """Two instances, each a group of its own."""
    return ClusterState(
        now_s=1.0,
        instances=(instance_state(0), instance_state(1)),
        groups=(group_of(0, (0, 0, LAYERS)), group_of(1, (1, 0, LAYERS))),
        loads=(idle_load(0), idle_load(1)),
        transitions=(),
        num_drops=0,
        num_restores=0,
    )


@dataclass
class EchoEngine:
    """Set the fields, from the event loop's thread or before the server starts."""

    max_model_len: int = 512
    vocab_size: int = 400
    eos_token_id: int | None = None
    num_cached: int = 0
    """Tokens of every prompt that count as found in the prefix cache."""
    script: Script = echo
    per_tick: int = 1
    """Tokens of a request delivered together."""
    tick_s: float = 0.0
    held: bool = False
    """While true, requests are queued and no token comes."""
    hold_after: int | None = None
    """Tokens after which a request stops moving (until aborted)."""
    fail_after: int | None = None
    """Tokens after which the engine gives up on a request."""
    refusal: Callable[[Request], Exception | None] = lambda request: None
    healthy: bool = True
    progressing: bool = True
    wholeness: Vitals = field(default_factory=lambda: Vitals(2, num_missing=0, num_errors=0))
    lying: bool = False
    """Admin commands report success and change nothing."""
    snapshot: ClusterState = field(default_factory=idle_state)
    submitted: list[Request] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    tasks: dict[RequestId, asyncio.Task[None]] = field(default_factory=dict)
    admitting: bool = True

    @property
    def limits(self) -> ServingLimits:
        return ServingLimits(self.max_model_len, 16, self.vocab_size)

    def submit(self, request: Request, deliver: Deliver) -> None:
        error = self.refusal(request)
        if error is not None:
            raise error
        if not self.admitting:
            raise Unavailable("The server is draining.")
        assert request.request_id not in self.tasks
        self.submitted.append(request)
        self.tasks[request.request_id] = asyncio.get_running_loop().create_task(
            self._run(request, deliver)
        )

    async def admitted(self, request_id: RequestId) -> None:
        pass

    async def _run(self, request: Request, deliver: Deliver) -> None:
        sampling, tokens = request.sampling, list(self.script(request))
        stops = set(sampling.stop_token_ids)
        if self.eos_token_id is not None and not sampling.ignore_eos:
            stops.add(self.eos_token_id)
        position = 0
        while True:
            await asyncio.sleep(self.tick_s)
            if self.held or position == self.hold_after:
                await asyncio.sleep(0.001)
                continue
            for _ in range(self.per_tick):
                if position == self.fail_after:
                    self._end(request)
                    deliver(
                        TokenOutput(request.request_id, position, None, None, FinishReason.ERROR)
                    )
                    return
                token_id = tokens[position]
                reason = None
                if token_id in stops and position >= sampling.min_tokens:
                    reason = FinishReason.STOP
                elif position + 1 >= sampling.max_tokens:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    self._end(request)
                logprobs = self._logprobs(sampling.num_logprobs, token_id)
                output = TokenOutput(request.request_id, position, token_id, logprobs, reason)
                if position == 0:
                    output = output._replace(
                        prompt_scores=prompt_scores(request), num_cached_tokens=self.num_cached
                    )
                deliver(output)
                if reason is not None:
                    return
                position += 1

    def _logprobs(self, num_logprobs: int | None, token_id: int) -> TokenLogprobs | None:
        if num_logprobs is None:
            return None
        ids = [token_id, *(one for one in range(num_logprobs) if one != token_id)]
        top = tuple((one, -0.5 - rank) for rank, one in enumerate(ids[:num_logprobs]))
        return TokenLogprobs(-0.5, 1, top)

    def _end(self, request: Request) -> None:
        self.tasks.pop(request.request_id, None)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        task = self.tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def state(self) -> ClusterState:
        self.snapshot = replace(self.snapshot, now_s=self.snapshot.now_s + 0.001)
        return self.snapshot

    def is_healthy(self) -> bool:
        return self.healthy

    def is_progressing(self) -> bool:
        return self.progressing

    def vitals(self) -> Vitals:
        return self.wholeness

    def num_unfinished(self) -> int:
        return len(self.tasks)

    def stop_admission(self) -> None:
        self.admitting = False

    async def drop(self, num_bytes: int | None) -> str:
        if self.snapshot.num_drops > self.snapshot.num_restores:
            raise InvalidRequest("nothing is left to drop")
        if not self.lying:
            half = LAYERS // 2
            self.snapshot = replace(
                self.snapshot,
                instances=(instance_state(0, 0, half), instance_state(1, half, LAYERS)),
                groups=(group_of(2, (0, 0, half), (1, half, LAYERS)),),
                loads=(idle_load(2),),
                transitions=(*self.snapshot.transitions, self._record(Kind.DROP)),
                num_drops=self.snapshot.num_drops + 1,
            )
        return "2 groups merged"

    async def restore(self) -> str:
        if not self.lying:
            fresh = idle_state()
            self.snapshot = replace(
                fresh,
                transitions=(*self.snapshot.transitions, self._record(Kind.RESTORE)),
                num_drops=self.snapshot.num_drops,
                num_restores=self.snapshot.num_restores + 1,
            )
        return "1 group split"

    def _record(self, kind: Kind) -> TransitionRecord:
        number = len(self.snapshot.transitions)
        return TransitionRecord(
            TransitionId(number),
            kind,
            "admin",
            1.0,
            self.snapshot.groups,
            self.snapshot.groups,
            committed_s=1.1,
            finished_s=1.3,
            outcome=Outcome.DONE,
            freed_bytes=8192,
            remap_s=0.002,
            gap_s=0.01,
            requests_moved=3,
            moved_bytes=5000,
            max_stall_s=0.05,
        )

    async def scale(self, num_instances: int) -> str:
        if num_instances > 4:
            raise InvalidRequest("`num_instances` must be from 1 to 4.", "num_instances")
        if not self.lying:
            size = ClusterSize(num_instances, fewest=num_instances)
            instances = tuple(map(instance_state, range(num_instances)))
            self.snapshot = replace(self.snapshot, size=size, instances=instances)
        return f"{num_instances} instances"

    def set_paused(self, paused: bool) -> None:
        if not self.lying:
            self.snapshot = replace(self.snapshot, paused=paused)

    async def reset_prefix_cache(self) -> None:
        self.num_cached = 0

    async def kill(self, instance_id: InstanceId) -> None:
        if not self.lying:
            self.snapshot = replace(
                self.snapshot,
                instances=tuple(
                    replace(one, alive=one.alive and one.spec.instance_id != instance_id)
                    for one in self.snapshot.instances
                ),
            )

    async def close(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()


def run_now(command: Coroutine[None, None, T]) -> T:
    """Run an admin command that never waits."""
    with pytest.raises(StopIteration) as end:
        command.send(None)
    return end.value.value
