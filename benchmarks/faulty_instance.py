"""An instance that fails on demand: files in a folder say how. For fault drills and tests.

LocalLauncher(program_of(folder))

refuse-N  instance N exits while it loads        sleep-N  it loads for ever
hang-N    its next step never ends               slow-N   it loads layers slowly
cut-N     its connections break in its next step mute-N   its next word to a peer is lost
poison    the step that begins a request whose prompt begins with POISON raises an error
"""

import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kunserve.cluster.instance import start as instance_start
from kunserve.cluster.instance.start import Loaded, run_instance
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Message
from kunserve.transport.peers.links import COUNTS_TOLD, PeerLinks
from kunserve_lab.world.fake_main import load_fake

POISON = (31, 4, 1, 5, 9)
"""A prompt that begins so kills the instance that takes it up, while ``poison`` is there."""
SLOW_LAYER_S = 0.2
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

    def load_layers(self, layers: LayerRange) -> None:
        """As the body's own, unless the disk shall be slow."""
        for _ in range(*layers):
            if self._shall("slow"):
                time.sleep(SLOW_LAYER_S)
        self._body.load_layers(layers)


def _cut_connections() -> None:
    """Shut every connection down, as a network does; what was on its way is lost."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    connection.getpeername()  # not of one that listens
                    connection.shutdown(socket.SHUT_RDWR)


class MutedLinks(PeerLinks):
    """Links on which a message is lost now and then."""

    mute: Path

    def send(self, dst: InstanceId, message: Message, payload: memoryview | None = None) -> bool:
        """As on any link, unless the message shall be lost."""
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
    MutedLinks.mute = folder / f"mute-{me}"
    assembly: Any = instance_start
    assembly.PeerLinks = MutedLinks
    faulty: Any = FaultyBody(loaded.body, folder)
    return loaded._replace(body=faulty)


if __name__ == "__main__":
    sys.exit(run_instance(_load))
