"""Everything that crosses a process boundary, as closed unions of frozen values.

Three conversations: the controller commands instances, instances report events to the
controller, and instances of one group talk to each other.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.load import NOTHING_DONE, LeaderTotals, LoadReport
from kunserve.core.request import FinishReason, Request, TokenLogprobs
from kunserve.core.snapshots import InstanceSpec, StageTime
from kunserve.core.step import StepPlan, StepResult
from kunserve.core.tokens import TokenIds
from kunserve.core.transfer import PeerAddress


class TokenOutput(NamedTuple):
    """One request's next output token, or its end without one."""

    request_id: RequestId
    position: int
    """Index among the request's output tokens, so that a re-run repeats none."""
    token_id: int | None
    """None when the request ends without a token (aborted, or an error)."""
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    queued_s: float | None = None
    """With the first token: from the arrival to the first step it was part of, where known."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A live request as its leader knows it, for handing it to another leader."""

    request: Request
    output_token_ids: TokenIds
    num_computed: int
    """Tokens whose KV exists; 0 when it waits."""
    num_blocks: int
    """Blocks its KV occupies; 0 when it waits."""
    num_preemptions: int


# Controller -> instance


@dataclass(frozen=True, slots=True)
class Connect:
    """Where the peers are. Sent to everyone whenever an instance joins."""

    peers: tuple[tuple[InstanceId, PeerAddress], ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """Take a request. A non-leader forwards it to its leader."""

    request: Request
    group_id: GroupId | None = None
    """Set when an instance forwards it: the group whose leader it is for."""
    migration_id: TransitionId | None = None
    """Set when the addressee is the target of the request's migration and has most of its KV."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Free everything of a request. Unknown ids are remembered in case the request is late."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Form:
    """Become (part of) a group at once, forgetting every sequence and its KV.

    Sent when an instance joins and after a failure; loads layers that are not held from disk.
    """

    layout: GroupLayout
    specs: tuple[InstanceSpec, ...]
    """Of the layout's members, in stage order."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """First phase of a transition: say whether it can be done. Changes nothing."""

    transition_id: TransitionId
    old: tuple[GroupLayout, ...]
    new: tuple[GroupLayout, ...]
    specs: tuple[InstanceSpec, ...]
    """Of every instance in the transition."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Second phase: do what was prepared, at the next step boundary."""

    transition_id: TransitionId


@dataclass(frozen=True, slots=True)
class Rollback:
    """Forget what was prepared."""

    transition_id: TransitionId


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Where a restore pulls layers from: a peer, or disk when ``instance_id`` is None."""

    layers: LayerRange
    instance_id: InstanceId | None


@dataclass(frozen=True, slots=True)
class MemberSources:
    """What one member of a group has to load."""

    instance_id: InstanceId
    sources: tuple[LayerSource, ...]


@dataclass(frozen=True, slots=True)
class LoadLayers:
    """Before a restore's commit: shrink the KV range and fill the missing layers, while serving.

    The leader gets it, keeps the group's KV within ``capacity_blocks`` from then on, and passes
    it on; it refuses if more is in use.
    """

    transition_id: TransitionId
    group_id: GroupId
    capacity_blocks: int
    """The group's KV capacity once every member holds the whole model again."""
    members: tuple[MemberSources, ...]


@dataclass(frozen=True, slots=True)
class Migrate:
    """Choose a running request and move it to another group while it runs.

    Groups of one instance only. Ids of migrations are ids of transitions, from one counter.
    """

    migration_id: TransitionId
    group_id: GroupId
    """Which the addressee leads."""
    target: InstanceId
    target_group: GroupId
    max_blocks: int
    """The largest request that may move."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """The migrating request is the target's now: it runs here no more, nor does it come back.

    Its KV stays until the target has it.
    """

    migration_id: TransitionId


@dataclass(frozen=True, slots=True)
class EndMigration:
    """A side of the migration is gone: let the other forget it, keeping the request it has."""

    migration_id: TransitionId


@dataclass(frozen=True, slots=True)
class ReturnWaiting:
    """Give these requests back if they wait without KV; ``Returned`` names those that did.

    Sent to the leader that has them. What runs, has KV or is unknown stays as it is.
    """

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave. In-flight work is lost unless it was drained before."""


Command: TypeAlias = (
    Connect
    | Submit
    | Abort
    | Form
    | Prepare
    | Commit
    | Rollback
    | LoadLayers
    | Migrate
    | HandOff
    | EndMigration
    | ReturnWaiting
    | Shutdown
)


# Instance -> controller


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and the instance can be given a group."""

    spec: InstanceSpec
    address: PeerAddress
    max_model_len: int
    """Longest prompt plus output that the instance can hold undropped."""
    summary: str
    """Weights, KV blocks and the longest request that fits, for people."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """An instance of an earlier front to the new one: it is loaded, and this is where it stands.

    It works on nothing until the new front has it ``Form`` a group.
    """

    ready: Ready
    """As it told its first front."""
    held: LayerRange
    kv_units: int
    layout: GroupLayout | None
    """The group it stands in; None when it could not go on with that."""
    num_received: int
    """As in ``LoadReport``: it goes on counting."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Tokens of one step, or ends of requests."""

    instance_id: InstanceId
    tokens: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """The leader has taken these requests out of its queue: nothing of them is left there.

    Sent in answer to ``ReturnWaiting`` (also when no request is given back), and unasked when the
    leader's group changes. Every token of them has been sent before.
    """

    instance_id: InstanceId
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Formed:
    """The answer to ``Form``: the instance stands in the group, with all weights it needs."""

    instance_id: InstanceId
    group_id: GroupId
    loaded_bytes: int
    """Weights that had to be loaded; 0 if all were there."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """A leader's load."""

    instance_id: InstanceId
    load: LoadReport


@dataclass(frozen=True, slots=True)
class Prepared:
    """The answer to ``Prepare``; a refusal says why."""

    transition_id: TransitionId
    instance_id: InstanceId
    refusal: str | None


@dataclass(frozen=True, slots=True)
class LayersLoaded:
    """The answer to ``LoadLayers``."""

    transition_id: TransitionId
    instance_id: InstanceId
    refusal: str | None
    loaded_bytes: int
    remap_s: float
    """The part that gave memory back from KV to weights."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Committed:
    """The instance runs in its new group; what the remap really did."""

    transition_id: TransitionId
    instance_id: InstanceId
    held: LayerRange
    kv_units: int
    freed_bytes: int
    """Bytes that moved from weights to KV; negative when they moved back."""
    remap_s: float
    gap_s: float
    """From the end of the last step in the old group to readiness in the new one."""
    sequences: tuple[RequestId, ...]
    """Requests that the instance leads now; empty on a follower."""
    totals: LeaderTotals = NOTHING_DONE
    """All that the instance has done as a leader: one that becomes a follower reports no more."""


@dataclass(frozen=True, slots=True)
class ExchangeDone:
    """Every request of the new group has its KV where its layers are (sent by the leader)."""

    transition_id: TransitionId
    group_id: GroupId
    num_requests: int
    """Requests whose KV moved."""
    moved_bytes: int
    seconds: float
    max_stall_s: float


@dataclass(frozen=True, slots=True)
class MigrationReady:
    """The request has stopped at its source, and the target has all its KV but the last blocks.

    The controller has been told every token of it by now.
    """

    migration_id: TransitionId
    instance_id: InstanceId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class MigrationOver:
    """Nothing of the migration is left at its source."""

    migration_id: TransitionId
    instance_id: InstanceId
    refusal: str | None
    """Why nothing moved; None if the target has taken the request."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A heartbeat, also while a long step runs; it tells whether the instance's loop moves on."""

    instance_id: InstanceId
    num_turns: int = 0
    """Grows with every turn of the loop, about ten times a second when idle."""
    longest_step_s: float = 0.0
    """Of all steps so far."""
    is_computing: bool = False
    """Whether the loop is inside a step."""


Event: TypeAlias = (
    Ready
    | Rejoin
    | Outputs
    | Returned
    | Formed
    | Report
    | Prepared
    | LayersLoaded
    | Committed
    | ExchangeDone
    | MigrationReady
    | MigrationOver
    | Alive
    | StageTime
)


# Instance -> instance


@dataclass(frozen=True, slots=True)
class Activation:
    """A microbatch on its way to the next stage; the hidden states travel beside it."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """The last stage's result, to the leader."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Handover:
    """An old leader's sequences, to every instance of the transition."""

    transition_id: TransitionId
    old_group: GroupId
    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True, slots=True)
class KvMoved:
    """Blocks [first_block, end_block) of a request arrived: the source may free them."""

    transition_id: TransitionId
    request_id: RequestId
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class KvDropped:
    """Nobody will pull the request's KV any more (it ended): the source may free it."""

    transition_id: TransitionId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ExchangeProgress:
    """A member's account of an exchange, to its new leader, on every change.

    The first one goes to every instance of the transition: from then on they may pull.
    """

    transition_id: TransitionId
    instance_id: InstanceId
    extra_units: int
    """Units that the exchange may use at most from now on beside the group's own blocks."""
    arrived: tuple[RequestId, ...]
    """Requests whose KV is complete at this member since the last message."""
    moved_bytes: int
    """KV bytes received since the last message."""
    is_finished: bool
    """The member has nothing left to send or receive."""
    lost: tuple[RequestId, ...] = ()
    """Requests whose KV could not be had since the last message: to be recomputed."""


@dataclass(frozen=True, slots=True)
class LayersDropped:
    """A restore is off: the member holds no other layers than before it. To its leader."""

    transition_id: TransitionId
    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class OfferKv:
    """A running request's blocks that will not change any more, for the target to pull.

    The first offer of a migration asks it to set memory aside. The answer is ``OfferTaken`` or
    ``OfferRefused``.
    """

    migration_id: TransitionId
    source: InstanceId
    group_id: GroupId
    """Which the target leads."""
    request_id: RequestId
    num_blocks: int
    """[0, num_blocks) may be pulled."""
    reserved_blocks: int
    """To be set aside in all."""
    largest_blocks: int
    """What the request may come to need."""


@dataclass(frozen=True, slots=True)
class OfferTaken:
    """The target of a migration has the request's blocks [0, end_block)."""

    migration_id: TransitionId
    end_block: int


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """The target of a migration takes nothing, or nothing more, and has freed what it had."""

    migration_id: TransitionId


@dataclass(frozen=True, slots=True)
class WithdrawKv:
    """The migrating request stays where it is, or has ended."""

    migration_id: TransitionId


PeerMessage: TypeAlias = (
    Activation
    | Sampled
    | Handover
    | KvMoved
    | KvDropped
    | ExchangeProgress
    | LayersDropped
    | OfferKv
    | OfferTaken
    | OfferRefused
    | WithdrawKv
    | LoadLayers
    | Submit
    | Abort
)
Message: TypeAlias = Command | Event | PeerMessage
