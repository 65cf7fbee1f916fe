"""KV that waits in host memory: swapped, or parked."""

from typing import Protocol

from kunserve.control.instance.body import HostCopy
from kunserve.core.ids import RequestId


class HostKv(Protocol):
    """Owner of it, block by block. Copies may run beside steps, or be done as they are asked for.

    A batch of them is asked for, begun, and once it is done comes the next.
    """

    def put(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """Ask for a block's copy out of KV memory. The units stay as they are until it is done."""
        ...

    def take(self, request_id: RequestId, block: int, unit: int, num_units: int) -> None:
        """Ask for a block's copy back into KV memory; it is kept no longer."""
        ...

    def begin(self) -> None:
        """Have what was asked for done, behind all steps so far and beside those that follow."""
        ...

    @property
    def is_copying(self) -> bool:
        """Whether any of what was asked for is not done yet. Never waits."""
        ...

    def wait(self) -> None:
        """Return when what was begun is done."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """The request is gone, and nothing is copied for it. Unknown ones are no mistake."""
        ...

    def close(self) -> None:
        """Give the memory back. No copy runs any more on return."""
        ...


def ask_copies(store: HostKv, out: tuple[HostCopy, ...], back: tuple[HostCopy, ...]) -> None:
    """As ``Body.swap_units`` is asked, block by block."""
    for copies, ask in ((out, store.put), (back, store.take)):
        for request_id, first_block, starts, num_units, _ in copies:
            for block, unit in enumerate(starts.tolist(), first_block):
                ask(request_id, block, unit, num_units)
