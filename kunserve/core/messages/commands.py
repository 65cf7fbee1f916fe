"""What the controller tells an instance."""

from dataclasses import dataclass
from typing import TypeAlias

from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange
from kunserve.core.request import Request
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.transfer import PeerAddress


@dataclass(frozen=True, slots=True)
class Connect:
    """Peers that the addressee will need, before the command that needs them; and those that died.

    All others that it knows stay as they are. Both ends are told of each other.
    """

    peers: tuple[tuple[InstanceId, PeerAddress], ...]
    gone: tuple[InstanceId, ...] = ()
    """They are heard no more, whatever comes of them."""
    slow_s: float = 0.0
    """So much longer may first contact take, because the peers read theirs between steps."""


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
class LayerSource:
    """Where layers are pulled from: a peer, or disk when ``instance_id`` is None."""

    layers: LayerRange
    instance_id: InstanceId | None


@dataclass(frozen=True, slots=True)
class Form:
    """Become (part of) a group at once, forgetting every sequence and its KV.

    Sent when an instance joins and after a failure. The answer, ``Formed``, comes when all layers
    of its stage are held: only those that are not are pulled.
    """

    layout: GroupLayout
    specs: tuple[InstanceSpec, ...]
    """Of the layout's members, in stage order."""
    sources: tuple[LayerSource, ...] = ()
    """Peers that hold layers which the addressee may lack. What none can give comes from disk."""
    num_sent: int = 0
    """Requests that the controller has sent to the addressee: it goes on counting from there."""


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
class AllowParking:
    """Nothing is left to drop for the group: for a while it may park requests.

    Sent to its leader while its memory is short, again and again; not acknowledged.
    """

    group_id: GroupId


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all KV of equal beginnings that no request of the group shares.

    Sent to everybody when somebody asks for it, because who leads may be changing; leaders obey.
    Not acknowledged.
    """


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
    | AllowParking
    | ResetPrefixCache
    | Shutdown
)
