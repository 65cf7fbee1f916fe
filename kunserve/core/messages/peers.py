"""What instances of one group, or of one transition, tell each other."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId, PrefixId, RequestId, StepId, TransitionId
from kunserve.core.messages.commands import Abort, LoadLayers, Submit
from kunserve.core.prefix import PrefixHash
from kunserve.core.prompt_scores import PromptScores
from kunserve.core.request import Request
from kunserve.core.step import StepPlan, StepResult
from kunserve.core.tokens import TokenIds


class PrefixPart(NamedTuple):
    """A request's next blocks, up to ``end_block``, are those of a prefix in the cache."""

    prefix_id: PrefixId
    end_block: int


@dataclass(frozen=True, slots=True)
class PrefixState:
    """A prefix that live requests share, for those who move it: it moves once for all of them."""

    prefix_id: PrefixId
    first_block: int
    names: tuple[PrefixHash, ...]
    """One for each block."""

    @property
    def end_block(self) -> int:
        """The block behind its last."""
        return self.first_block + len(self.names)


@dataclass(frozen=True, slots=True)
class SequenceKv:
    """A live request's KV, for those who move it."""

    request_id: RequestId
    arrival_s: float
    num_blocks: int
    """Blocks that the KV occupies; 0 when the request waits."""
    max_stored_tokens: int
    """Tokens of KV that the request may come to need."""
    shared: tuple[PrefixPart, ...] = ()
    """What the KV begins with that is the prefix cache's. The blocks behind are its own."""
    priority: int = 0

    @property
    def first_own_block(self) -> int:
        """Of its blocks, the first that nobody shares."""
        return self.shared[-1].end_block if self.shared else 0


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
    shared: tuple[PrefixPart, ...] = ()
    """As in ``SequenceKv``."""

    @property
    def kv(self) -> SequenceKv:
        """What everybody else must know of it."""
        request = self.request
        return SequenceKv(
            request.request_id,
            request.arrival_s,
            self.num_blocks,
            request.max_stored_tokens,
            self.shared,
            request.priority,
        )


@dataclass(frozen=True, slots=True)
class Activation:
    """A microbatch on its way to the next stage; the hidden states travel beside it."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """The last stage's result, to the leader; not where all stages compute the output head."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class FinalRows:
    """What the last layer gave for the tokens that sample; the rows travel beside it.

    To every stage that computes a part of the output head, and to the leader.
    """

    group_id: GroupId
    step_id: StepId
    scores: tuple[PromptScores | None, ...]
    """As in ``StepResult``; only the leader gets them."""


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A stage has computed its part of the output head, to the leader; it travels beside it."""

    group_id: GroupId
    step_id: StepId
    first_row: int
    """Of the stage's rows of the output head."""


@dataclass(frozen=True, slots=True)
class Handover:
    """An old leader's sequences, to every instance of the transition."""

    transition_id: TransitionId
    old_group: GroupId
    kv: tuple[SequenceKv, ...]
    """Of every sequence."""
    sequences: tuple[SequenceState, ...]
    """With their tokens: those that the addressee leads from now on."""
    prefixes: tuple[PrefixState, ...] = ()
    """Of the cache, what the sequences share."""


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
    | FinalRows
    | HeadPart
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
