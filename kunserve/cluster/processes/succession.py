"""From one front to the next: what it takes over from the one before it, and what it leaves."""

import asyncio
import hashlib
import logging
import secrets
from dataclasses import replace
from pathlib import Path

import msgspec

import kunserve
from kunserve.cluster.instance.lease import LeaseTerms
from kunserve.cluster.processes.launch import FakeSettings, InstanceProcess, Launcher
from kunserve.cluster.processes.seat import RunState, Seat, WiresState
from kunserve.core.config import ChatConfig, ClusterConfig, LogConfig, ServerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from kunserve.model.packed import WEIGHTS_LAYOUT
from kunserve.transport.children.child import ended
from kunserve.transport.wire.codec import MESSAGE_TYPES
from kunserve.transport.wire.socket_folder import SocketFolder, has_room

logger = logging.getLogger(__name__)

IDS_PER_FRONT = 1_000_000
"""Ids of groups and transitions that one front may use: instances rely on ids that grow."""


class Succession:
    """The front's account at its seat."""

    def __init__(
        self,
        seat: Seat,
        earlier: RunState | None,
        epoch: int,
        found: dict[InstanceId, InstanceProcess],
        settings: str,
        grace_s: float,
    ) -> None:
        """``found``: the processes that the ``earlier`` front has left. See ``begin``."""
        self._seat = seat
        self._grace_s = grace_s
        self._settings = settings
        self._front = secrets.token_hex(8)
        self.epoch = epoch
        """Counts the fronts of this cluster."""
        self._found = found
        self.wires: WiresState | None = None
        """Of the front before this one, if its instances are of use."""
        self._ids = () if earlier is None else earlier.ids
        self.loaded = () if earlier is None else earlier.loaded
        """Instances that have been ready for an earlier front."""
        self._is_of_use = earlier is not None and earlier.settings == settings
        self.max_model_len: int | None = None
        """What all instances can serve, as far as fronts have found out."""
        if found and earlier is not None and self._is_of_use:
            folder = None if seat.path is None else Path(earlier.socket_folder)
            self.sockets = SocketFolder(folder)
            self.wires = earlier.wires
            self.max_model_len = earlier.max_model_len
        else:
            seat.clear()
            self.sockets = SocketFolder(self._place_for_sockets())

    @classmethod
    async def begin(
        cls,
        folder: Path,
        plan: Plan,
        fake: FakeSettings | None,
        launcher: Launcher,
        model_files: str | None = None,
    ) -> "Succession":
        """Become the front of this folder, or of what the launcher has in its place.

        Raises ConfigError when another one is.
        """
        grace_s = plan.config.cluster.front_grace_s
        seat = await launcher.seat(folder, grace_s)
        earlier = seat.read()
        marks, epoch = ({}, 0) if earlier is None else (earlier.marks, earlier.epoch + 1)
        found = await launcher.find(marks, epoch)
        settings = settings_digest(plan, fake, model_files)
        return cls(seat, earlier, epoch, found, settings, grace_s)

    @property
    def ids(self) -> tuple[InstanceId, ...]:
        """The earlier front's instances: its cluster may have grown or shrunk. None if it has no
        heir.
        """
        return self._ids if self._found and self._is_of_use else ()

    @property
    def first_id(self) -> int:
        """The first id of a group or a transition that no earlier front has used."""
        return self.epoch * IDS_PER_FRONT

    def _place_for_sockets(self) -> Path | None:
        """Where no instance of an earlier front calls; None if that has no room for a path."""
        if self._seat.path is None:
            return None
        place = self._seat.path / self._front[:8]
        if not has_room(place):
            return None
        place.mkdir(mode=0o700)
        return place

    async def take_over(self) -> dict[InstanceId, InstanceProcess]:
        """The earlier front's instances that run; those of other settings are ended."""
        if self._found and self._is_of_use:
            logger.info("instances found running instances=%s", sorted(self._found))
            return self._found
        if self._found:
            logger.info("instances of other settings are ended instances=%s", sorted(self._found))
            await self._end_found()
        return {}

    async def _end_found(self) -> None:
        """End the earlier front's instances: they are of no use."""
        found, self._found = self._found.values(), {}
        await asyncio.gather(*(ended(process) for process in found))

    def lease(self) -> LeaseTerms:
        """What an instance that is started now is told of its front."""
        return LeaseTerms(str(self._seat.path or ""), self._front, self._grace_s, self.epoch)

    @property
    def front(self) -> str:
        """The name of the front that is now."""
        return self._front

    def note(
        self,
        ids: tuple[InstanceId, ...],
        marks: dict[InstanceId, str],
        wires: WiresState | None = None,
        loaded: tuple[InstanceId, ...] = (),
    ) -> None:
        """For the next front: which processes run. From now on they may know this front.

        ``ids``: of all instances, also of those that are between two processes. ``loaded``: of
        those that have been ready.
        """
        if wires is not None and self._seat.path is None:
            wires = replace(wires, secret_key=None)  # Ray's own channels may be read
        self._seat.write(
            RunState(
                front=self._front,
                epoch=self.epoch,
                settings=self._settings,
                socket_folder=str(self.sockets.path),
                marks=marks,
                wires=wires,
                ids=ids,
                loaded=loaded,
                max_model_len=self.max_model_len,
            )
        )

    def close(self) -> None:
        """All instances have ended: nothing is left for a next front."""
        self._seat.remove()


def settings_digest(plan: Plan, fake: FakeSettings | None, model_files: str | None) -> str:
    """Equal for fronts whose instances do for each other: all settings but those of the HTTP
    server, of chats and of the log, the files of the model, how weights lie in memory, and the
    language that processes talk to each other.

    Nor does it matter where Ray is called, nor what the front has timed on its own machine.
    """
    language = [(kind.__name__, kind.__annotations__) for kind in MESSAGE_TYPES]
    usual, config, measured = ClusterConfig(), plan.config, plan.measured
    asked = replace(
        config,
        server=ServerConfig(),
        chat=ChatConfig(),
        log=LogConfig(),
        cluster=replace(
            config.cluster,
            ray_address=usual.ray_address,
            ray_name=usual.ray_name,
            ray_placement=usual.ray_placement,
            ray_autoscaling=usual.ray_autoscaling,
        ),
    )
    found = (measured.ring, measured.share, measured.weight_sharers)
    instances = msgspec.json.encode((asked, *found, fake, model_files))
    words = f"{kunserve.__version__} {WEIGHTS_LAYOUT} {language}".encode()
    return hashlib.sha256(words + instances).hexdigest()
