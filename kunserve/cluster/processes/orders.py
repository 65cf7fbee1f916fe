"""What an instance of this cluster is started with, and what a later front is left about those."""

import os

from kunserve.cluster.driver.topology import Places, place_of
from kunserve.cluster.processes.front_wires import FrontWires
from kunserve.cluster.processes.launch import FakeSettings, InstanceOrder
from kunserve.cluster.processes.processes import Processes
from kunserve.cluster.processes.succession import Succession
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from kunserve.transport.wire.channel import FrontChannel
from kunserve.transport.wire.socket_folder import SocketFolder


class InstanceOrders:
    """Writes orders for a front's instances."""

    def __init__(
        self,
        plan: Plan,
        fake: FakeSettings | None,
        channel: FrontChannel,
        sockets: SocketFolder,
        succession: Succession | None,
        wires: FrontWires | None,
        model_files: str | None,
        places: Places,
    ) -> None:
        """``succession`` None: instances end with this process."""
        self._plan = plan
        self._fake = fake
        self._channel = channel
        self._sockets = sockets
        self._succession = succession
        self._wires = wires
        self._model_files = model_files
        self._places = places

    def of(self, instance_id: InstanceId) -> InstanceOrder:
        """As of now: the front may have got another address."""
        order = InstanceOrder(
            instance_id=instance_id,
            fake=self._fake,
            front_address=self._channel.address,
            socket_folder=str(self._sockets.path),
            plan=self._plan,
            lease=None if self._succession is None else self._succession.lease(),
            parent_pid=os.getpid() if self._succession is None else None,
            model_files=self._model_files,
            place=place_of(self._places, instance_id),
        )
        return order if self._wires is None else self._wires.addressed(order)

    def note(self, processes: Processes) -> None:
        """Which processes there are, or have loaded, has changed: the next front is to know."""
        if self._succession is not None:
            wires = None if self._wires is None else self._wires.state
            self._succession.note(processes.ids, processes.marks, wires, processes.loaded)
