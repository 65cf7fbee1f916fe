"""What an instance of this cluster is started with, and what a later front is left about those."""

import os
from dataclasses import replace

from kunserve.cluster.api import ServingLimits
from kunserve.cluster.driver.topology import Places, place_of
from kunserve.cluster.processes.front_wires import FrontWires
from kunserve.cluster.processes.launch import FakeSettings, InstanceOrder
from kunserve.cluster.processes.processes import Processes
from kunserve.cluster.processes.succession import Succession
from kunserve.core.config import ServerConfig
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
        """As of now: the front may have got another address. What only the front needs, such as
        API keys, stays with it.
        """
        order = InstanceOrder(
            instance_id=instance_id,
            fake=self._fake,
            front_address=self._channel.address,
            socket_folder=str(self._sockets.path),
            plan=replace(self._plan, config=replace(self._plan.config, server=ServerConfig())),
            lease=None if self._succession is None else self._succession.lease(),
            parent_pid=os.getpid() if self._succession is None else None,
            model_files=self._model_files,
            place=place_of(self._places, instance_id),
        )
        return order if self._wires is None else self._wires.addressed(order)

    def settled(self, limits: ServingLimits, processes: Processes) -> ServingLimits:
        """What this front serves: no more than the one before it, whose instances may come back."""
        if self._succession is None:
            return limits
        longest = self._succession.max_model_len or limits.max_model_len
        self._succession.max_model_len = longest = min(longest, limits.max_model_len)
        self.note(processes)
        return replace(limits, max_model_len=longest)

    def note(self, processes: Processes) -> None:
        """Which processes there are, or have loaded, has changed: the next front is to know."""
        if self._wires is not None:
            self._wires.know(processes.made_keys)
        if self._succession is not None:
            wires = None if self._wires is None else self._wires.state
            self._succession.note(processes.ids, processes.marks, wires, processes.loaded)
