"""An instance that fails on demand: files in a folder say how. For fault drills and tests.

LocalLauncher(program_of(folder))

refuse-N  instance N exits while it loads        sleep-N  it loads for ever
hang-N    its next step never ends               slow-N   it loads layers slowly
stuck-N   its disk gives nothing                 eio-N    its disk fails
shy-N     whom it is told of it meets seconds later
cut-N     its connections break in its next step mute-N   its next word to a peer is lost
poison    the step that begins a request whose prompt begins with POISON raises an error
"""

import contextlib
import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kunserve.cluster.instance import start as instance_start
from kunserve.cluster.instance.start import Loaded, run_instance
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Message
from kunserve.transport.bulk.movable_memory import WriteGate
from kunserve.transport.peers.links import COUNTS_TOLD, PeerLinks
from kunserve_lab.world.fake_main import load_fake

POISON = (31, 4, 1, 5, 9)
"""A prompt that begins so kills the instance that takes it up, while ``poison`` is there."""
SLOW_LAYER_S = 0.2
MEETS_S = 2.0
"""How late a late peer is."""
POLL_S = 0.02


def program_of(folder: Path) -> tuple[str, str]:
    """What ``LocalLauncher`` runs so that ``folder`` rules."""
    return (__file__, str(folder))


class FaultyBody:
    """A body with faults. Everything else is the body's own."""

    def __init__(self, body: Any, folder: Path) -> None:
        self._body = body
        self._folder = folder
        self._me = body.spec.instance_id

    def __getattr__(self, name: str) -> Any:
        """What has no fault."""
        return getattr(self._body, name)

    def _shall(self, fault: str) -> bool:
        return (self._folder / f"{fault}-{self._me}").exists()

    def execute(
        self, work: StepWork, hidden: Any, *calls: Callable[[], None] | None
    ) -> StepOutcome:
        """As the body's own, unless the step shall hang or raise."""
        while self._shall("hang"):
            time.sleep(POLL_S)
        if self._shall("cut"):
            (self._folder / f"cut-{self._me}").unlink(missing_ok=True)
            _cut_connections()
        if work.is_first and (self._folder / "poison").exists():
            assert not _takes_poison(work), "poisoned"
        outcome: StepOutcome = self._body.execute(work, hidden, *calls)
        return outcome

    def load_layers(self, layers: LayerRange, gate: WriteGate) -> None:
        """As the body's own, unless the disk shall be slow, stand still or fail."""
        while self._shall("stuck"):
            time.sleep(POLL_S)
        if self._shall("eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for _ in range(*layers):
            if self._shall("slow"):
                time.sleep(SLOW_LAYER_S)
        self._body.load_layers(layers, gate)


def _cut_connections() -> None:
    """Shut every connection down, as a network does; what was on its way is lost."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    connection.getpeername()  # not of one that listens
                    connection.shutdown(socket.SHUT_RDWR)


class _Held(NamedTuple):
    dst: InstanceId
    message: Message
    payload: memoryview | None


class FaultyLinks(PeerLinks):
    """Links on which a message is lost now and then, and that stand late."""

    mute: Path
    shy: Path

    def __init__(self, *words: Any, **settings: Any) -> None:
        """As any links."""
        super().__init__(*words, **settings)
        self._late_s: dict[InstanceId, float] = {}
        """When peers are met whose first contact takes its time."""
        self._held: list[_Held] = []

    def connect(
        self,
        addresses: Mapping[InstanceId, str],
        keys: Mapping[InstanceId, str] | None = None,
        slow_s: Mapping[InstanceId, float] | None = None,
    ) -> None:
        """As any links; but if it shall be so, those that are new hear nothing yet."""
        fresh = addresses.keys() - self._links.keys()
        super().connect(addresses, keys, slow_s)
        self._late_s = {peer: at_s for peer, at_s in self._late_s.items() if peer in addresses}
        self._held = [one for one in self._held if one.dst in addresses]
        if self.shy.exists():
            self._late_s.update(dict.fromkeys(fresh, time.monotonic() + MEETS_S))

    def unreached(self, peers: Iterable[InstanceId]) -> list[InstanceId]:
        """Those that are late, too."""
        self._meet()
        peers = list(peers)
        return sorted({*super().unreached(peers), *(self._late_s.keys() & set(peers))})

    def _meet(self) -> None:
        now_s = time.monotonic()
        self._late_s = {peer: at_s for peer, at_s in self._late_s.items() if now_s < at_s}
        held, self._held = self._held, []
        for one in held:
            self.send(*one)

    def tell_counts(self) -> None:
        """Called about ten times a second: a time to see who is there now."""
        self._meet()
        super().tell_counts()

    def send(self, dst: InstanceId, message: Message, payload: memoryview | None = None) -> bool:
        """As on any link, unless the message shall be lost, or wait for its peer."""
        if dst in self._late_s:
            self._held.append(_Held(dst, message, payload))
            return True
        if self.mute.exists():
            self.mute.unlink(missing_ok=True)
            self._counts_due[dst] = COUNTS_TOLD
            self._outgoing.next(dst)
            return True
        return super().send(dst, message, payload)


def _takes_poison(work: StepWork) -> bool:
    assert work.token_ids is not None
    first = 0
    for chunk in work.plan.chunks:
        tokens = work.token_ids[first : first + chunk.num_tokens].tolist()
        head = tuple(tokens[: len(POISON)])  # a chunk may be shorter than the prompt
        if chunk.start == 0 and head == POISON[: len(head)]:
            return True
        first += chunk.num_tokens
    return False


def _load(order: InstanceOrder) -> Loaded:
    folder, me = Path(sys.argv[1]), order.instance_id
    if (folder / f"refuse-{me}").exists():
        sys.exit(1)
    while (folder / f"sleep-{me}").exists():
        time.sleep(POLL_S)
    if order.fake is not None:
        loaded = load_fake(order)
    else:
        from kunserve.cluster.instance.main import load_model  # brings torch

        loaded = load_model(order)
    FaultyLinks.mute, FaultyLinks.shy = folder / f"mute-{me}", folder / f"shy-{me}"
    assembly: Any = instance_start
    assembly.PeerLinks = FaultyLinks
    faulty: Any = FaultyBody(loaded.body, folder)
    return loaded._replace(body=faulty)


if __name__ == "__main__":
    sys.exit(run_instance(_load))
