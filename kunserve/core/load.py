"""A group's load: what its leader reports, and what the controller knows besides."""

from dataclasses import dataclass

from kunserve.core.ids import GroupId


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A leader's account of its group, sent about ten times a second and on sharp change.

    The defaults are those of a group that has not reported yet.
    """

    group_id: GroupId
    sequence_number: int = 0
    """Counts this leader's reports from 1, so that an old one is not taken for news."""
    num_received: int = 0
    """Requests the leader has accepted so far: what was sent after it is not in this report."""
    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    capacity_blocks: int = 0
    growth_blocks: int = 0
    """Blocks that the running requests are still expected to need."""
    head_of_line_blocks: int = 0
    """Blocks that the first waiting request needs."""
    waiting_blocks: int = 0
    """Blocks that all waiting requests need."""
    waiting_tokens: int = 0
    """Prompt tokens of all waiting requests not yet computed."""
    num_stalled: int = 0
    """Requests that wait for their KV in an exchange."""
    num_preemptions: int = 0
    lost_tokens: int = 0
    """Tokens of KV thrown away by preemptions so far."""
    prompt_tokens: int = 0
    """Prompt tokens computed so far (recomputation included)."""
    generation_tokens: int = 0
    stuck_s: float = 0.0
    """Seconds since the last completed step while there was work; 0 when idle."""
    largest_request_blocks: int = 0
    """Blocks the largest live request may come to need: some pool must hold it after a restore."""
    largest_expected_blocks: int = 0
    """Blocks the largest live request is expected to need: how unevenly they part at most."""

    @property
    def demand_blocks(self) -> int:
        """Running demand with growth, plus the queue's head (Llumnix's virtual usage)."""
        return self.used_blocks + self.growth_blocks + self.head_of_line_blocks


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One group's last report, and what was sent to its leader since."""

    report: LoadReport
    capacity_blocks: int
    """KV blocks of the group. The report may tell of less while a transition narrows them."""
    num_instances: int = 1
    undropped_blocks: int = 0
    """Capacity of its members if each held the whole model."""
    num_unreported: int = 0
    """Requests sent that the report does not know of (``LoadReport.num_received``)."""
    unreported_blocks: int = 0
    """KV blocks that those need."""
    prompt_tokens_per_s: float = 0.0
    """Lately computed; 0 when unknown."""
    formed_s: float | None = None
    """When the transition that made the group was over; None if there was none."""
    in_transition: bool = False

    @property
    def group_id(self) -> GroupId:
        """The group."""
        return self.report.group_id

    @property
    def is_reported(self) -> bool:
        """Whether the leader has said anything yet."""
        return self.report.sequence_number > 0

    @property
    def demand_blocks(self) -> int:
        """Running demand with growth, the queue's head, and what is on its way."""
        return self.report.demand_blocks + self.unreported_blocks

    @property
    def need_blocks(self) -> int:
        """Demand with the whole queue: the paper's memory demand of all queued requests."""
        queue = self.report.waiting_blocks - self.report.head_of_line_blocks
        return self.demand_blocks + queue
