"""What an instance tells the controller."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import FinishReason, TokenLogprobs
from kunserve.core.snapshots import InstanceSpec, StageTime
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
    computed_s: float | None = None
    """With the first token: since the first step that it was part of, by its leader's clock."""
    num_cached_tokens: int = 0
    """With the first token: of the prompt, those whose KV was found and not computed."""
    prompt_scores: tuple[PromptScores, ...] = ()
    """With the first token, from the controller to the client: all scores of the prompt."""


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
    totals: LeaderTotals = field(default_factory=LeaderTotals)
    """What earlier fronts have counted of it already."""
    front: str = ""
    """The front that it is for, because one that came and died may leave it to the next one."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Tokens of one step, or ends of requests; and scores of the step's prompts.

    The scores are bounded by a step's tokens, so a long prompt's come in several messages. All of
    them come before the request's first token.
    """

    instance_id: InstanceId
    tokens: tuple[TokenOutput, ...]
    scores: tuple[PromptScores, ...] = ()


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
    unreached: tuple[InstanceId, ...] = ()
    """Members to whom no connection stands, if that is why."""


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
    prepare_s: float = 0.0
    """See ``Committed``."""


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
    prepare_s: float = 0.0
    """What mapping memory a second time took before, a piece at a time: no part of the gap."""
    tidy_s: float = 0.0
    """What unmapping old addresses has taken, if none is left; else ``Tidied`` tells."""
    totals: LeaderTotals = field(default_factory=LeaderTotals)
    """All that the instance has done as a leader: one that becomes a follower reports no more."""


@dataclass(frozen=True, slots=True)
class Tidied:
    """What a remap left mapped is unmapped; sent at any time after ``Committed``."""

    transition_id: TransitionId
    instance_id: InstanceId
    seconds: float


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
class TransferProgress:
    """In a change of groups, of layers, or a migration: more bytes have come since the last word.

    Every few seconds, and not while none come.
    """

    instance_id: InstanceId
    num_bytes: int
    """Of KV and weights that have come since the instance's process began."""


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
class LinkBroken:
    """What came on the link from a peer is not what the peer sent: something is missing.

    The instance reads nothing more on that link until the peer forms a group from nothing.
    """

    instance_id: InstanceId
    peer: InstanceId
    reason: str
    is_down: bool = False
    """The instance cannot reach the peer. Nobody knows whether anything is missing."""


@dataclass(frozen=True, slots=True)
class LateContact:
    """The instance reaches a peer for the first time, after it has said that it does not."""

    instance_id: InstanceId
    peer: InstanceId


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
    wants_to_leave: bool = False
    """Whether the process was asked to end (SIGTERM), and would lose nobody's request by it."""


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
    | Tidied
    | ExchangeDone
    | TransferProgress
    | MigrationReady
    | MigrationOver
    | LinkBroken
    | LateContact
    | Alive
    | StageTime
)
