"""One change of groups: what it waits for, and what its members have told."""

import enum
from dataclasses import dataclass, field

from kunserve.core.ids import GroupId, InstanceId, RequestId, TransitionId
from kunserve.core.messages import LoadLayers
from kunserve.core.snapshots import Kind, TransitionRecord


class Phase(enum.StrEnum):
    """What a transition waits for."""

    LOADING = "loading"
    PREPARING = "preparing"
    COMMITTING = "committing"
    EXCHANGING = "exchanging"


@dataclass(slots=True)
class Transition:
    """One change of groups and who still has to answer."""

    record: TransitionRecord
    phase: Phase
    phase_since_s: float
    """When it came to this, or when bytes came last."""
    load: LoadLayers | None = None
    waits_for: set[InstanceId] = field(default_factory=set)
    exchanging: set[GroupId] = field(default_factory=set)
    followers: dict[RequestId, InstanceId] = field(default_factory=dict)
    """New leader of each request, learnt from the members' answers."""

    @property
    def transition_id(self) -> TransitionId:
        """The id all its messages carry."""
        return self.record.transition_id

    @property
    def members(self) -> set[InstanceId]:
        """Every instance in it."""
        return {m for layout in self.record.groups_before for m in layout.members}

    @property
    def silence(self) -> str:
        """Who has yet to answer, for people."""
        if self.is_committed:
            return f"no end of the exchange in groups {sorted(self.exchanging)}"
        return f"no answer from instances {sorted(self.waits_for)}"

    @property
    def old_groups(self) -> set[GroupId]:
        """The groups that change."""
        return {layout.group_id for layout in self.record.groups_before}

    @property
    def is_restoring(self) -> bool:
        """Whether it is a restore that can still be called off."""
        return self.record.kind is Kind.RESTORE and self.may_roll_back

    @property
    def may_roll_back(self) -> bool:
        """Whether no member has changed anything that it could not take back."""
        return self.phase in (Phase.LOADING, Phase.PREPARING)

    def has_switched(self, member: InstanceId) -> bool:
        """Whether the member has said so, and others have not yet."""
        return self.phase is Phase.COMMITTING and member not in self.waits_for

    @property
    def is_committed(self) -> bool:
        """Whether all members stand in the new groups."""
        return self.phase is Phase.EXCHANGING
