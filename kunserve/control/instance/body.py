"""The seam between the brain and a body: what an instance's agent asks of its machine.

Real (CPU), fake (tests) and simulated bodies implement these two protocols; nothing above
them knows which one it has.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from kunserve.control.arrays import Int32Array
from kunserve.core.ids import InstanceId, RequestId, StepId
from kunserve.core.layout import LayerRange, VocabRange
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import SamplingParams
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.core.transfer import KvPull


class UnitCopy(NamedTuple):
    """Copy ``num_units`` consecutive units inside one instance. Ranges may not overlap."""

    src: int
    dst: int
    num_units: int


class HostCopy(NamedTuple):
    """Consecutive blocks of one request between KV memory and host memory."""

    request_id: RequestId
    first_block: int
    starts: Int32Array
    """[num_blocks] the first of each block's ``num_units`` consecutive units."""
    num_units: int
    is_shared: bool = False
    """Others use these blocks too, and go on doing so."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One plan, made local to one stage: which layers, and where each request's KV is."""

    plan: StepPlan
    layers: LayerRange
    is_first: bool
    is_last: bool
    token_ids: Int32Array | None
    """[num_tokens] input tokens; only the first stage has them, unless all are fed back."""
    tables: Int32Array
    """[rows, max_blocks] block table entries of every sequence; entry e puts layer l at e + l."""
    rows: Int32Array
    """[num_chunks] the row of each chunk's request."""
    shares_head: bool = False
    """Whether all stages compute the output head together: then the last stage gives the rows that
    sample, and the first one samples."""
    is_ahead: bool = False
    """Whether the body is given it while it computes the one before."""
    feeds: Int32Array | None = None
    """[num_tokens] of a step that runs ahead: which token of those that another step samples each
    input is; -1 where ``token_ids`` has it."""
    feeds_on: StepId | None = None
    """Which step that is, on its way through the group."""

    @property
    def awaits_tokens(self) -> bool:
        """Whether it computes from tokens that another stage samples."""
        return self.feeds is not None and not self.is_last and bool(self.feeds.max() >= 0)

    @property
    def gives_rows(self) -> bool:
        """Whether the outcome's ``hidden`` is what the last layer gave for tokens that sample."""
        return self.shares_head and self.is_last and self.plan.samples


@dataclass(frozen=True, slots=True)
class HeadWork:
    """A stage's part of the output head, of one microbatch."""

    plan: StepPlan
    rows: VocabRange
    """Which tokens' logits to compute."""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """All parts of a microbatch's output head are there: its tokens are to be sampled."""

    plan: StepPlan
    parts: tuple[tuple[int, Any], ...]
    """What ``Body.head_part`` gave on each stage, or its bytes, in the order of the vocabulary, and
    the first row of each."""
    skipped: frozenset[RequestId]
    """Requests that are wanted no more: their tokens are None."""
    scores: tuple[PromptScores | None, ...]
    """As in ``StepResult``."""


AnyWork: TypeAlias = StepWork | HeadWork | SampleWork
"""What a stage computes of a microbatch."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What running a step gave: hidden states for the next stage, or sampled tokens."""

    hidden: Any
    """Opaque to the brain; None on the last stage, unless the step ``gives_rows``."""
    tokens: tuple[SampledToken, ...]
    scores: tuple[PromptScores | None, ...] = ()
    """As in ``StepResult``."""
    is_told: bool = False
    """The driver has told the next stage where ``hidden`` will be, before it was there; or nobody
    may hear of the step, because it is void."""

    def result_of(self, plan: StepPlan) -> StepResult:
        """What the leader is told, on the last stage."""
        return StepResult(plan.group_id, plan.step_id, self.tokens, self.scores)


class RunsAhead(Protocol):
    """What may be asked of a device while it computes a step."""

    def feeds_back(self, sampling: SamplingParams) -> bool:
        """Whether a step may now be launched that feeds on such a request's token."""
        ...

    def reads_ahead(self, hidden: Any) -> bool:
        """Whether a step may now be launched that reads these of the stage before."""
        ...


@dataclass(frozen=True, slots=True)
class Remap:
    """What a change of the weights range and the KV range really did."""

    kv_units: int
    """Units backed by memory now."""
    moved_bytes: int
    """From weights to KV; negative the other way."""
    seconds: float
    prepare_s: float = 0.0
    """What ``Memory.prepare`` took before, between steps or beside them."""


class Memory(Protocol):
    """One instance's memory. Called from one thread, between steps."""

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Copy in order; a later copy may read what an earlier one wrote. Done on return.

        Between steps; or while one runs, over units that it neither reads nor writes.
        """
        ...

    def prepare(self, layers: LayerRange) -> str | None:
        """Do now a piece of what may fail of a change to ``layers``; a text says why it cannot be.

        May be called while a step runs, again and again until nothing ``is_preparing``. Layers
        held and KV stay in use until ``drop`` or ``reclaim`` makes the change. A call for the
        layers held calls it off.
        """
        ...

    @property
    def is_preparing(self) -> bool:
        """Whether some of what was prepared last is left to be done."""
        ...

    @property
    def tidied_s(self) -> float | None:
        """What it took to clear up behind the last change; None while some is left to do."""
        ...

    def drop(self, keep: LayerRange) -> Remap:
        """Unmap every held layer outside ``keep`` and map its granules at the KV tail."""
        ...

    def reclaim(self, layers: LayerRange) -> Remap:
        """Shrink the KV range and map memory under ``layers`` again, its content undefined.

        The caller has moved every live unit below ``spec.units_when_holding(layers)`` first.
        """
        ...


class Body(Protocol):
    """One instance's compute, and its memory. Called from one thread, between steps."""

    @property
    def memory(self) -> Memory:
        """What it computes with."""
        ...

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        ...

    def execute(self, work: StepWork, hidden: Any) -> StepOutcome:
        """Run the stage's layers over the microbatch (``hidden`` is None on the first stage)."""
        ...

    def head_part(self, work: HeadWork, rows: Any) -> Any:
        """The logits of some of the vocabulary for rows that a last stage gave, or what is enough
        of them to sample from.
        """
        ...

    def sample(self, work: SampleWork) -> tuple[SampledToken, ...]:
        """A token for each sampling chunk, on the stage that ran the microbatch first.

        What the body knows of a request that is skipped may be of a later start of it.
        """
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop per-request state such as the sampling history."""
        ...

    def swap_units(
        self, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...], *, beside_step: bool
    ) -> None:
        """Copy blocks to host memory, and others back from there, where they are kept no longer.

        With ``beside_step`` copies may run beside steps that touch none of these units, while
        ``is_copying``; otherwise they are done on return. The next ones are asked for once they
        are. ``forget`` gives up what is in host memory of a request, and on its way.
        """
        ...

    @property
    def is_copying(self) -> bool:
        """Whether any of these copies is not done yet. Never waits."""
        ...

    def end_copies(self) -> None:
        """Return once none is left."""
        ...


class Mover(Protocol):
    """Bulk bytes between instances: receiver-driven, chunked, yielding to activations.

    Runs beside the steps. Completion comes back to the agent as ``pulled_kv`` or
    ``pulled_layers`` calls made by the driver, never from inside these methods.
    """

    def export_kv(self, request_id: RequestId, entries: Int32Array) -> None:
        """Let peers read the request's blocks; the entries stay valid until ``withdraw_kv``."""
        ...

    def withdraw_kv(self, request_id: RequestId) -> None:
        """Stop serving the request's blocks (they are about to be freed)."""
        ...

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Fill blocks ``entries`` (one per block of the piece) over ``piece.layers``."""
        ...

    def pull_layers(self, layers: LayerRange, src: InstanceId | None) -> None:
        """Fill the mapped weights of ``layers`` from a peer that holds them.

        ``src`` None: from disk or a copy in host memory, which always succeeds.
        """
        ...

    def offer_layers(self, layers: LayerRange | None) -> None:
        """Let peers pull these layers and no others.

        Narrowed before layers are unmapped, widened once they are filled.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Once this returns nothing is written for the request; its pulls never complete."""
        ...

    def cancel_layers(self) -> None:
        """Once this returns no weights are written; what fills them never completes."""
        ...

    @property
    def num_bytes_taken(self) -> int:
        """Of KV and weights that have come here so far, parts of what is under way included."""
        ...

    def reset(self) -> None:
        """Forget every export and every pull, of KV and of layers; none of them completes."""
        ...
