"""How instances reach the front: by files of one machine, or over a network with keys."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace

from zmq import ZMQError

from kunserve.cluster.instance.lease import LeaseTerms
from kunserve.cluster.processes.launch import InstanceOrder, InstanceProcess
from kunserve.cluster.processes.processes import Processes
from kunserve.cluster.processes.reachability import Reachability
from kunserve.cluster.processes.seat import WiresState
from kunserve.cluster.processes.succession import Succession
from kunserve.core.config import ClusterConfig
from kunserve.core.errors import ConfigError
from kunserve.core.faults import Fault
from kunserve.core.ids import InstanceId
from kunserve.transport.wire.channel import FrontChannel, FrontNetwork
from kunserve.transport.wire.network import (
    FrontPlace,
    Keys,
    Network,
    any_port_of,
    bracketed,
    new_keys,
)


class FrontWires:
    """Owner of the front's address and keys, and of who is let in."""

    def __init__(
        self,
        host: str,
        link_timeout_s: float,
        grace_s: float,
        name: str | None,
        earlier: WiresState | None = None,
        epoch: int = 0,
    ) -> None:
        """Listen at ``host``, if possible where the ``earlier`` front has: instances call there."""
        self._host = host
        self._link_timeout_s = link_timeout_s
        self._grace_s = grace_s
        self._epoch = epoch
        self._earlier = earlier
        self._keys = new_keys()
        if earlier is not None and earlier.secret_key is not None:
            self._keys = Keys(earlier.public_key, earlier.secret_key)
        self._name = name or secrets.token_hex(8)
        self._instance_keys: dict[InstanceId, str] = {}
        self._address = ""

    @classmethod
    def open(
        cls, host: str | None, config: ClusterConfig, succession: Succession | None
    ) -> "FrontWires | None":
        """None without a host: all instances are on this machine. Raises ConfigError."""
        if host is None:
            return None
        if config.trace_out is not None:
            raise ConfigError("--trace-out is for one machine: the clocks of several differ")
        if succession is None:
            return cls(host, config.link_timeout_s, config.front_grace_s, None)
        left = succession.wires, succession.epoch
        return cls(host, config.link_timeout_s, config.front_grace_s, succession.front, *left)

    @property
    def network(self) -> FrontNetwork:
        """For the channel."""
        return FrontNetwork(self._keys, self._link_timeout_s, self._name)

    async def start(self, channel: FrontChannel, found: Iterable[InstanceProcess] = ()) -> None:
        """Listen, and let those in that an earlier front has started. Raises ConfigError.

        They are told where, if that is another place.
        """
        earlier = self._earlier
        await self._listen(channel)
        self._channel = channel
        self._reach = Reachability(channel.reaches)
        port = channel.address.rpartition(":")[2]
        self._address = f"tcp://{bracketed(self._host)}:{port}"
        if earlier is None:
            return
        for instance_id, key in earlier.instance_keys.items():
            self._instance_keys[instance_id] = key
            channel.admit(instance_id, key)
        for process in found:
            process.follow(FrontPlace(self._address, self._keys.public))

    async def _listen(self, channel: FrontChannel) -> None:
        places = [any_port_of(self._host)]
        earlier = self._earlier
        if earlier and earlier.address.rpartition(":")[0] == f"tcp://{bracketed(self._host)}":
            places.insert(0, earlier.address)
        for place in places:
            try:
                await channel.start(place)
            except ZMQError as error:
                reason = f"cannot listen at {place} for instances: {error}"
            else:
                return
        raise ConfigError(reason)

    def addressed(self, order: InstanceOrder) -> InstanceOrder:
        """The order with keys for the instance's next process, which alone is heard from now on.

        Its launcher knows its host and fills that in.
        """
        keys = new_keys()
        self._instance_keys[order.instance_id] = keys.public
        self._channel.admit(order.instance_id, keys.public)
        return replace(
            order,
            front_address=self._address,
            lease=LeaseTerms("", self._name, self._grace_s, self._epoch),
            parent_pid=None,  # it says nothing on another host; there the lease does
            network=Network(
                host="",
                public_key=keys.public,
                secret_key=keys.secret,
                front_public_key=self._keys.public,
                link_timeout_s=self._link_timeout_s,
            ),
        )

    def know(self, keys: Mapping[InstanceId, str]) -> None:
        """Let these processes in, whose keys were made beside them: the secret ones stay there."""
        for instance_id, public_key in keys.items():
            if self._instance_keys.get(instance_id) != public_key:
                self._instance_keys[instance_id] = public_key
                self._channel.admit(instance_id, public_key)

    def look(self, ready: Iterable[InstanceId], processes: Processes, now_s: float) -> None:
        """Give up who cannot be reached, whether its process can be ended or not. At every tick."""
        for instance_id in self._reach.lost(ready, now_s):
            processes.condemn(instance_id, "it cannot be reached", Fault.UNKNOWN, is_cut_off=True)

    @property
    def state(self) -> WiresState:
        """For the next front."""
        public, secret = self._keys
        return WiresState(self._address, public, secret, dict(self._instance_keys))
