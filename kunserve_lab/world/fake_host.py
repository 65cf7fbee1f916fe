"""Host memory of a fake body, whose copies may be as late as those of a device."""

from kunserve.control.instance.body import HostCopy
from kunserve.core.ids import RequestId
from kunserve.transport.bulk.host_store import HostStore
from kunserve_lab.world.viewed_memory import ViewedMemory

GARBAGE = 0xA5
"""What memory holds after it changed hands."""


class FakeHost(HostStore):
    """What has left is garbage, though its units are not free yet, unless others use it."""

    def __init__(self, memory: ViewedMemory) -> None:
        super().__init__(memory)
        self._viewed = memory
        self._late: list[tuple[tuple[HostCopy, ...], tuple[HostCopy, ...]]] = []
        self.num_waiting = 0
        """Steps that copies asked for run behind."""

    def ask(
        self, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...], num_late_steps: int
    ) -> None:
        """Copy behind so many steps, over what lies there then."""
        assert not self._late, "the last ones are not done"
        self._late, self.num_waiting = [(out, back)], num_late_steps
        if not num_late_steps:
            self.end()

    def step(self) -> None:
        """One has run."""
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self.end()

    @property
    def is_late(self) -> bool:
        """Whether steps run before copies that were asked for."""
        return bool(self._late)

    def end(self) -> None:
        """Do what is late."""
        late, self._late = self._late, []
        for out, back in late:
            for request_id, first_block, starts, num_units, is_shared in out:
                for block, unit in enumerate(starts.tolist(), first_block):
                    self.put(request_id, block, unit, num_units)
                    if not is_shared:
                        self._viewed.unit_view(unit, num_units).fill(GARBAGE)
            for request_id, first_block, starts, num_units, _ in back:
                for block, unit in enumerate(starts.tolist(), first_block):
                    self.take(request_id, block, unit, num_units)

    def forget(self, request_id: RequestId) -> None:
        """What is late for it is done before."""
        moving = (copy for late in self._late for copies in late for copy in copies)
        if any(copy.request_id == request_id for copy in moving):
            self.end()
        super().forget(request_id)
