"""A front in a process of its own, which chaos may kill: orders come in by lines, news go out.

``python -m benchmarks.faults.chaos_front ORDER`` with a ``FrontOrder`` as JSON. ``Front`` is the
other end. Standard input that ends means that nobody is there any more: then the cluster is closed.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from benchmarks.faults.faulty_instance import program_of
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings, LocalLauncher
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.core import messages
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import InvalidRequest, Overloaded, Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import FinishReason, Request
from kunserve.transport.wire import codec

STATE_PERIOD_S = 0.05
CHANGE_S = 60.0
"""How long a forced change may take."""
LONGEST_LINE_BYTES = 1 << 20


class FrontOrder(msgspec.Struct, frozen=True):
    """What a front is started with; the next one gets the same."""

    config: KunServeConfig
    vocab_size: int
    fake: FakeSettings | None
    faults: str
    """The folder that instances obey."""
    run_folder: str
    weight_sharers: int = 0
    """Of one copy of the weights; 0: each instance has its own."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A client sends a request."""

    message: bytes
    """As between a front and its instances."""

    @classmethod
    def of(cls, request: Request) -> "Submit":
        """From what the client asks for."""
        return cls(bytes(codec.encode(messages.Submit(request))))

    @property
    def request(self) -> Request:
        """What the client asks for."""
        message = codec.decode(self.message)
        assert isinstance(message, messages.Submit), message
        return message.request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """A client leaves."""

    request_id: str


class Change(msgspec.Struct, frozen=True, tag=True):
    """Something is asked for by hand."""

    number: int
    what: Literal["drop", "restore", "kill"]
    instance_id: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Close the cluster."""


class Token(msgspec.Struct, frozen=True, tag=True):
    """A token of a request, or its end."""

    request_id: str
    position: int
    token_id: int | None
    finish_reason: FinishReason | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is not served."""

    request_id: str


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ``Change``."""

    number: int
    is_done: bool


class State(msgspec.Struct, frozen=True, tag=True):
    """How the cluster is, many times a second."""

    marks: tuple[str | None, ...] = ()
    """Of each instance's process; None between two."""
    num_missing: int = 0
    num_unfinished: int = 0
    num_held: int = 0
    """Blocks in use, and requests that wait."""
    num_quarantined: int = 0
    num_errors: int = 0
    num_open_files: int = 0


Asked: TypeAlias = Submit | Abort | Change | Leave
News: TypeAlias = Token | Refused | Changed | State

_ASKED = msgspec.json.Decoder(Asked)
_NEWS = msgspec.json.Decoder(News)


# The front's end


async def serve(order: FrontOrder) -> None:
    """Serve until told to leave."""
    cluster = await LocalCluster.start(
        Plan(order.config, Measured(weight_sharers=order.weight_sharers)),
        vocab_size=order.vocab_size,
        fake=order.fake,
        launcher=LocalLauncher(program_of(Path(order.faults))),
        run_folder=Path(order.run_folder),
    )
    lines = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    telling = asyncio.create_task(_tell_state(cluster, order.config.cluster.num_instances))
    changes: set[asyncio.Task[None]] = set()
    try:
        async for line in lines:
            match _ASKED.decode(line):
                case Submit() as asked:
                    _submit(cluster, asked)
                case Abort(request_id):
                    cluster.abort(RequestId(request_id))
                case Change() as asked:
                    changes.add(asyncio.create_task(_change(cluster, asked)))
                case Leave():
                    break
    finally:
        for task in (telling, *changes):
            task.cancel()
        await asyncio.gather(telling, *changes, return_exceptions=True)
        await cluster.close()


def _say(news: News) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def _submit(cluster: LocalCluster, asked: Submit) -> None:
    request = asked.request

    def deliver(token: messages.TokenOutput) -> None:
        _say(Token(request.request_id, token.position, token.token_id, token.finish_reason))

    try:
        cluster.submit(request, deliver)
    except (Unavailable, Overloaded):
        _say(Refused(request.request_id))


async def _change(cluster: LocalCluster, asked: Change) -> None:
    is_done = False
    with contextlib.suppress(InvalidRequest, TimeoutError):
        async with asyncio.timeout(CHANGE_S):
            match asked.what:
                case "drop":
                    await cluster.drop(None)
                case "restore":
                    await cluster.restore()
                case "kill":
                    await cluster.kill(InstanceId(asked.instance_id))
        is_done = True
    _say(Changed(asked.number, is_done))


async def _tell_state(cluster: LocalCluster, num_instances: int) -> None:
    while True:
        pids = [cluster.pid_of(InstanceId(i)) for i in range(num_instances)]
        state, vitals = cluster.state(), cluster.vitals()
        _say(
            State(
                marks=tuple(None if pid is None else mark_of(pid) for pid in pids),
                num_missing=vitals.num_missing,
                num_unfinished=cluster.num_unfinished(),
                num_held=sum(load.used_blocks + load.num_waiting for load in state.loads),
                num_quarantined=state.num_quarantined,
                num_errors=vitals.num_errors,
                num_open_files=len(os.listdir("/proc/self/fd")),
            )
        )
        await asyncio.sleep(STATE_PERIOD_S)


# The other end


class Front:
    """A front that can be killed and started anew. Belongs to one event loop."""

    def __init__(
        self, order: FrontOrder, on_news: Callable[[Token | Refused], None], temporary: Path
    ) -> None:
        """``temporary`` is the front's and its instances' folder for temporary files."""
        self._order = order
        self._on_news = on_news
        self._temporary = temporary
        self._process: asyncio.subprocess.Process | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self._numbers = itertools.count()
        self._changes: dict[int, asyncio.Future[bool]] = {}
        self._errors_before = 0
        """Internal errors of the fronts before this one."""
        self.state: State | None = None
        """Of the front that lives; None until it serves."""

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self.state is not None

    @property
    def num_errors(self) -> int:
        """Internal errors of all fronts so far."""
        return self._errors_before + (0 if self.state is None else self.state.num_errors)

    async def start(self) -> None:
        """Start it, with the same words as any time before; returns once it serves."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.faults.chaos_front"),
            msgspec.json.encode(self._order).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self._temporary)},
            limit=LONGEST_LINE_BYTES,
        )
        self._heard.clear()
        self._hearing = asyncio.create_task(self._hear(self._process))
        await self._heard.wait()
        assert self.is_up, f"the front did not start: exit code {self._process.returncode}"

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(msgspec.DecodeError):  # the last line may be half a line
            async for line in process.stdout:
                news = _NEWS.decode(line)
                match news:
                    case State():
                        self.state = news
                        self._heard.set()
                    case Changed(number, is_done):
                        self._changes.pop(number).set_result(is_done)
                    case _:
                        self._on_news(news)
        await process.wait()
        self._errors_before = self.num_errors
        self.state = None
        for change in self._changes.values():
            change.set_result(False)
        self._changes.clear()
        self._heard.set()

    def ask(self, asked: Asked) -> bool:
        """Send something; False if nobody is there."""
        if not self.is_up:
            return False
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(asked) + b"\n")
        return True

    async def change(self, what: Literal["drop", "restore", "kill"], instance_id: int = 0) -> bool:
        """Have something done by hand; whether it was."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        if not self.ask(Change(number, what, instance_id)):
            return False
        self._changes[number] = answer
        is_done: bool = await answer
        return is_done

    def signal(self, number: signal.Signals) -> None:
        """To the process, if it runs."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def die(self) -> None:
        """``kill -9``; returns once all it said has been heard."""
        assert self._hearing is not None
        self.signal(signal.SIGKILL)
        await self._hearing

    async def leave(self) -> None:
        """Close the cluster."""
        if self._hearing is None:
            return
        self.ask(Leave())
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await self._hearing


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=FrontOrder)))
