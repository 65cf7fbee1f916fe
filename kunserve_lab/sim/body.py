"""A body without memory or compute: it keeps accounts, and says how long things take."""

from collections.abc import Sequence
from typing import Any, Self

from kunserve.control.instance.body import (
    AnyWork,
    HeadWork,
    HostCopy,
    Remap,
    SampleWork,
    StepOutcome,
    StepWork,
    UnitCopy,
)
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import Chunk, SampledToken, StepPlan
from kunserve_lab.sim.profile import InstanceProfile


class SimBody:
    """Implements ``control.instance.body.Body`` and ``Memory``.

    Nothing takes time here: the driver lets it pass.

    Hidden states are the number of their bytes. Every token is 0; workloads say how many there
    are (``ignore_eos``).
    """

    is_preparing = False
    is_copying = False
    tidied_s = 0.0

    def __init__(
        self, profile: InstanceProfile, instance_id: InstanceId, place: Place = ONE_HOST
    ) -> None:
        self._profile = profile
        self._spec = profile.spec_of(instance_id, place)
        spec = self._spec
        self.held = LayerRange(0, spec.num_layers)
        self.kv_units = spec.kv_units
        self._blocked_s = 0.0
        self._swap_s = 0.0
        """What copies to and from host memory beside the next step take."""
        self.swapped: dict[RequestId, set[int]] = {}
        """Blocks in host memory."""
        self.swapped_out_bytes = 0
        """So far; as is the next."""
        self.swapped_back_bytes = 0

    @property
    def spec(self) -> InstanceSpec:
        """What the instance is made of."""
        return self._spec

    @property
    def memory(self) -> Self:
        """See ``Body``. Its books are the body's."""
        return self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        return not self.swapped

    def work_s(self, work: AnyWork, busy_share: float) -> float:
        """How long the body will take for anything. Called once for each."""
        match work:
            case StepWork():
                return self.step_s(work, busy_share)
            case HeadWork():
                assert self._spec.head is not None, work
                share = work.rows.num_rows / self._spec.head.num_rows
                return share * self._head_s(work.plan.chunks, busy_share)
            case SampleWork():
                return 0.0

    def step_s(self, work: StepWork, busy_share: float) -> float:
        """How long the step will take, and the copies beside it. Called once for each.

        ``busy_share`` is the share of the other instances that compute as it begins.
        """
        profile, swap_s = self._profile, self._swap_s
        self._swap_s = 0.0
        has_head = work.is_last and not work.shares_head
        batch = work.plan.chunks, work.layers.num_layers, has_head
        step_s = profile.times.stage_s(*batch)
        if profile.times_alone is not None and busy_share < 1.0:
            step_s = busy_share * step_s + (1.0 - busy_share) * profile.times_alone.stage_s(*batch)
        return max(step_s, swap_s)

    def _head_s(self, chunks: Sequence[Chunk], busy_share: float) -> float:
        """The whole output head: what it adds to a last stage."""
        profile = self._profile
        alone = profile.times_alone or profile.times
        return sum(
            share * (times.stage_s(chunks, 1, True) - times.stage_s(chunks, 1, False))
            for times, share in ((profile.times, busy_share), (alone, 1.0 - busy_share))
        )

    def take_blocked_s(self) -> float:
        """How long memory work since the last call keeps the instance from doing anything."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    def execute(self, work: StepWork, hidden: Any) -> StepOutcome:
        """What the step gives, once its time has passed."""
        assert (hidden is None) == work.is_first, work.plan
        assert self.held.covers(work.layers), (self.held, work.layers)
        model = self._profile.model
        if not work.is_last:
            return StepOutcome(work.plan.num_tokens * model.hidden_size * model.dtype_bytes, ())
        if work.gives_rows:
            num_rows = sum(chunk[3] for chunk in work.plan.chunks)
            return StepOutcome(num_rows * model.hidden_size * model.dtype_bytes, ())
        return StepOutcome(None, _zeros(work.plan))

    def head_part(self, work: HeadWork, rows: Any) -> Any:
        """Each row's largest logit, and its token."""
        return 8 * sum(chunk[3] for chunk in work.plan.chunks)

    def sample(self, work: SampleWork) -> tuple[SampledToken, ...]:
        """Every token is 0."""
        return _zeros(work.plan)

    def forget(self, request_id: RequestId) -> None:
        """Give up what is in host memory of a request."""
        self.swapped.pop(request_id, None)

    def copy_units(self, copies: tuple[UnitCopy, ...]) -> None:
        """Copies inside device memory."""
        num_units = sum(copy.num_units for copy in copies)
        self._blocked_s += num_units * self._spec.unit_bytes / self._profile.copy_bytes_per_s

    def swap_units(
        self, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...], *, beside_step: bool
    ) -> None:
        """Copies over PCIe, both ways at once."""
        num_out = num_back = 0
        for request_id, first_block, starts, num_units, _ in out:
            blocks = range(first_block, first_block + len(starts))
            assert self.swapped.setdefault(request_id, set()).isdisjoint(blocks), request_id
            self.swapped[request_id].update(blocks)
            num_out += len(blocks) * num_units
        for request_id, first_block, starts, num_units, _ in back:
            blocks = range(first_block, first_block + len(starts))
            assert self.swapped[request_id].issuperset(blocks), request_id
            self.swapped[request_id].difference_update(blocks)
            num_back += len(blocks) * num_units
        self.swapped_out_bytes += num_out * self._spec.unit_bytes
        self.swapped_back_bytes += num_back * self._spec.unit_bytes
        seconds = max(num_out, num_back) * self._spec.unit_bytes / self._profile.host_bytes_per_s
        if beside_step and self._profile.hides_host_copies:
            self._swap_s += seconds
        else:
            self._blocked_s += seconds

    def end_copies(self) -> None:
        """They are over with the step that they run beside."""

    def prepare(self, layers: LayerRange) -> str | None:
        """Nothing can fail here."""
        return None

    def drop(self, keep: LayerRange) -> Remap:
        """Weights outside ``keep`` become KV memory."""
        assert self.held.covers(keep) and keep.num_layers > 0, (self.held, keep)
        return self._hold(keep)

    def reclaim(self, layers: LayerRange) -> Remap:
        """KV memory becomes room for weights again."""
        assert layers.covers(self.held), (self.held, layers)
        return self._hold(layers)

    def _hold(self, layers: LayerRange) -> Remap:
        spec, before = self._spec, self.kv_units
        self.kv_units = spec.backed_units(layers)
        self.held = layers
        moved_bytes = (self.kv_units - before) * spec.unit_bytes
        granules = abs(moved_bytes) // spec.granule_bytes
        seconds = granules * self._profile.remap_granule_s
        self._blocked_s += seconds
        return Remap(self.kv_units, moved_bytes, seconds)


def _zeros(plan: StepPlan) -> tuple[SampledToken, ...]:
    """What every step samples."""
    return tuple(
        [SampledToken(chunk[0], 0, None) for chunk in plan.chunks for _ in range(chunk[3])]
    )
