"""Starts instances as actors of a Ray cluster: Ray chooses the node, and knows which nodes live.

    front --- order ---> warden (actor) --- stdin ---> instance's process

What instances say to the front and to each other goes over their own sockets. Ray carries three
calls in an instance's life: where are you, begin, how did it end.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

import kunserve
from kunserve.cluster.processes.launch import (
    FakeSettings,
    InstanceOrder,
    InstanceProcess,
)
from kunserve.cluster.processes.seat import Seat
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError, StartupFailure, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.plan import Plan
from kunserve.transport.wire.network import FrontPlace
from kunserve_extras.ray.node_agent import Birth, End, NodeAgent, Site
from kunserve_extras.ray.nodes import need_of, num_that_fit, place_of, shortage
from kunserve_extras.ray.seat import RaySeat, seat_name
from kunserve_extras.ray.session import NAMESPACE, Session, awaited, end_actor

logger = logging.getLogger(__name__)

PROMPT_S = 5.0
"""An actor that has no node after this long waits for room, and the autoscaler is told."""
ANSWER_S = 5.0
"""How long an actor may take to answer when a front looks for the instances of an earlier one. Who
is late, most likely on a node that has died with that front, is ended."""
BEGIN_S = 30.0
"""How long an actor that has answered may take to start its process, which loads after that."""
KILL_S = 2.0
"""How long a warden may take to kill its process, before the actor itself is killed."""
UNREACHED_S = 1.0
"""Between two questions to an actor that cannot be reached but is not known to be dead."""
ATTEMPTS = 3
"""Actors that may die before they have begun, for one start."""


class RayLauncher:
    """Implements ``Launcher``. Belongs to one event loop; Ray's own threads do the waiting."""

    def __init__(
        self,
        session: Session,
        placement: str = "spread",
        *,
        is_detached: bool = False,
        autoscales: bool = False,
        program: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        """``is_detached``: instances outlive this process, as their leases allow. ``autoscales``:
        Ray's autoscaler adds nodes for whom there is no room. ``name`` tells this server from
        others of the Ray cluster.

        ``program`` is what Python runs instead of the instance's own entry point.
        """
        self.front_host: str | None = session.host
        self._is_detached = is_detached
        self._autoscales = autoscales
        self._session = session
        self._strategy = "SPREAD" if placement == "spread" else "DEFAULT"
        self._program = program
        self._name = name or secrets.token_hex(4)
        self._waiting: set[asyncio.Future[Any]] = set()
        """For a node."""
        self._running: set[RayProcess] = set()
        self._need: dict[str, float] = {}
        self._has_asked = False
        """Whether the autoscaler was told of any demand."""
        self._is_closed = False

    async def start(self, order: InstanceOrder) -> "RayProcess":
        """Have Ray place an actor, and have that start the process on its node."""
        need = self._need = need_of(order.plan.config, order.fake)
        for attempt in range(1, ATTEMPTS + 1):
            if self._is_closed:
                raise OSError("the cluster ends")
            name = f"{self._name}/{order.instance_id}-{secrets.token_hex(4)}"
            actor = self._actor(name, need)
            try:
                birth = await self._begin(actor, order, need)
                epoch = 0 if order.lease is None else order.lease.epoch
                return self._process(actor, name, birth, epoch)
            except RayError as error:
                end_actor(actor)
                # Most likely on a node that has died, which Ray notices late.
                if attempt == ATTEMPTS or not isinstance(error, RayActorError):
                    said = _short(error)
                    raise OSError(f"its Ray actor could not start it: {said}") from error
            except BaseException:
                end_actor(actor)
                raise
            await asyncio.sleep(UNREACHED_S)
        raise AssertionError("unreachable")

    async def _begin(self, actor: Any, order: InstanceOrder, need: dict[str, float]) -> Birth:
        site = await self._placed(actor, order, need)
        if site.version != kunserve.__version__:
            raise OSError(
                f"node {site.ip} has KunServe {site.version}, the front "
                f"{kunserve.__version__}: install the same everywhere"
            )
        told = msgspec.json.encode(at(order, site))
        try:
            async with asyncio.timeout(BEGIN_S):
                begun: Birth = await awaited(actor.begin.remote(told, self._program))
        except TimeoutError:
            raise OSError(
                f"its Ray actor on {site.ip} did not start it within {BEGIN_S:g} s"
            ) from None
        return begun

    def _actor(self, name: str, need: dict[str, float]) -> Any:
        more = {"num_gpus": need["GPU"]} if "GPU" in need else {}
        if "memory" in need:
            more["memory"] = need["memory"]
        kind: Any = _Actor
        return kind.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached" if self._is_detached else None,
            num_cpus=need["CPU"],
            max_restarts=0,  # the front starts another one
            scheduling_strategy=self._strategy,
            **more,
        ).remote()

    async def _placed(self, actor: Any, order: InstanceOrder, need: dict[str, float]) -> Site:
        """Where the actor is, once Ray has found it a node. Raises OSError when it is late."""
        answer: asyncio.Future[Site] = asyncio.ensure_future(awaited(actor.site.remote()))
        self._waiting.add(answer)
        try:
            await asyncio.wait({answer}, timeout=PROMPT_S)
            if not answer.done():
                if self._autoscales:
                    self._tell_demand(need)
                lack = self._shortage(need, len(self._running) + len(self._waiting))
                logger.warning("instance=%d waits for a node: %s", order.instance_id, lack)
                await asyncio.wait({answer}, timeout=order.plan.config.cluster.start_timeout_s)
            if answer.cancelled():
                raise OSError("the cluster ends")
            if not answer.done():
                lack = self._shortage(need, len(self._running) + len(self._waiting))
                raise OSError(f"Ray has no free node for it: {lack}")
            return answer.result()
        finally:
            self._waiting.discard(answer)
            answer.cancel()

    def _shortage(self, need: dict[str, float], num: int) -> str:
        return shortage(self._session.nodes(), need, num)

    def _tell_demand(self, need: dict[str, float]) -> None:
        """Ray's autoscaler is to have room for all instances, those that run included."""
        self._has_asked = True
        num = len(self._running) + len(self._waiting)
        self._session.request([need] * num)

    def _process(self, actor: Any, name: str, birth: Birth, epoch: int) -> "RayProcess":
        process = RayProcess(actor, name, birth, epoch)
        self._running.add(process)
        process.end.add_done_callback(lambda _: self._forget(process))
        return process

    def _forget(self, process: "RayProcess") -> None:
        self._running.discard(process)
        if self._has_asked and not self._is_closed:
            self._tell_demand(self._need)  # nodes that nobody needs may go

    async def seat(self, folder: Path, grace_s: float) -> Seat:
        """At Ray's head, so that the next front may be on another node."""
        return await RaySeat.take(self._name, self._session.host, grace_s)

    async def find(
        self, marks: Mapping[InstanceId, str], epoch: int
    ) -> dict[InstanceId, InstanceProcess]:
        """Those that run, as their wardens say. All other wardens of this server are ended."""
        names = {instance_id: mark.partition("@")[2] for instance_id, mark in marks.items()}
        births = await asyncio.gather(*(self._find(name, epoch) for name in names.values()))
        found: dict[InstanceId, InstanceProcess] = {}
        for (instance_id, name), (actor, birth) in zip(names.items(), births, strict=True):
            if birth is not None:
                found[instance_id] = self._process(actor, name, birth, epoch)
        kept = {names[instance_id] for instance_id in found}
        for name in self._session.actors(f"{self._name}/"):
            if name not in kept and name != seat_name(self._name):
                logger.info("what an earlier front has left is ended actor=%s", name)
                with contextlib.suppress(ValueError):
                    end_actor(ray.get_actor(name, namespace=NAMESPACE))
        return found

    async def _find(self, name: str, epoch: int) -> tuple[Any, Birth | None]:
        """The warden of this name, and its process if it still has one."""
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            async with asyncio.timeout(ANSWER_S):
                return actor, await awaited(actor.find.remote(epoch))
        except (ValueError, RayError, TimeoutError):
            return None, None

    def check_start(self, config: KunServeConfig, fake: FakeSettings | None) -> None:
        """Raise ConfigError when the nodes cannot hold the cluster and nobody adds nodes."""
        self._check(config, fake, config.cluster.num_instances)

    def check_growth(
        self, plan: Plan, fake: FakeSettings | None, num_more: int, pids: Iterable[int]
    ) -> None:
        """The same for a larger cluster. Who runs elsewhere on these nodes is Ray's to know."""
        self._check(plan.config, fake, len(self._running) + num_more)

    def _check(self, config: KunServeConfig, fake: FakeSettings | None, num: int) -> None:
        need = need_of(config, fake)
        nodes = self._session.nodes()
        if num_that_fit(nodes, need) < num and not self._autoscales:
            raise TooLittleMemory(shortage(nodes, need, num))

    def close(self) -> None:
        """Whoever waits for a node waits no more."""
        self._is_closed = True
        if self._has_asked:
            self._session.request([])
        for answer in tuple(self._waiting):
            answer.cancel()


class RayProcess:
    """Implements ``InstanceProcess`` for a process that a warden watches."""

    def __init__(self, actor: Any, name: str, birth: Birth, epoch: int) -> None:
        """``epoch``: of the front that may command it."""
        self._actor = actor
        self._epoch = epoch
        self.pid = birth.pid
        self.host = birth.host
        self.mark = f"{birth.mark}@{name}"
        self.public_key = birth.public_key
        self.said = b""
        self.exit_code: int | None = None
        self._is_killed = False
        self._is_anothers = False
        """Whether a later front commands it."""
        self._asking: asyncio.Task[None] | None = None
        self.end = asyncio.ensure_future(self._see_end())

    async def _see_end(self) -> str:
        while True:
            try:
                end: End = await awaited(self._actor.end.remote())
            except ActorUnavailableError:
                if not self._is_killed:
                    await asyncio.sleep(UNREACHED_S)
                    continue
                reason = f"its actor on {self.host} cannot be reached"
            except Exception as error:  # Ray's, most likely: whatever it is, nobody watches
                reason = f"its actor on {self.host} is gone: {_short(error)}"
            else:
                reason = f"{end.reason} (on {self.host})"
                self.exit_code, self.said = end.exit_code, self._named(end.said)
            end_actor(self._actor)
            return reason

    def _named(self, said: bytes) -> bytes:
        """With the node's name, where it says that it cannot start: files are per node."""
        try:
            failure = msgspec.json.decode(said, type=StartupFailure)
        except msgspec.MsgspecError:
            return said
        return msgspec.json.encode(replace(failure, message=f"on {self.host}: {failure.message}"))

    async def wait(self) -> str:
        """Wait for its end; how it ended."""
        return await asyncio.shield(self.end)

    def kill(self) -> None:
        """Have the warden kill it; if that does not answer, the warden is killed, and it too."""
        if not self.end.done():
            self._is_killed = True
            self._asking = asyncio.ensure_future(self._ask_to_kill())
            asyncio.get_running_loop().call_later(KILL_S, self._end_warden)

    async def _ask_to_kill(self) -> None:
        with contextlib.suppress(RayError):
            self._is_anothers = not await awaited(self._actor.kill.remote(self._epoch))

    def _end_warden(self) -> None:
        if not self._is_anothers:
            end_actor(self._actor)

    def follow(self, front: FrontPlace) -> None:
        """The warden tells it."""
        self._actor.follow.remote(front, self._epoch)


def at(order: InstanceOrder, site: Site) -> InstanceOrder:
    """The order as it is carried out there: where the process stands, and how it is reached.

    Keys are made there, because Ray's own channels may be read.
    """
    network = order.network and replace(order.network, host=site.ip, public_key="", secret_key="")
    return replace(order, place=place_of(site.ip, site.labels), network=network)


@ray.remote
class _Actor(NodeAgent):
    """The warden, told by Ray where it is."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        me = context.current_actor
        super().__init__(
            ray.util.get_node_ip_address(), context.get_node_labels(), lambda: end_actor(me)
        )


def _short(error: Exception) -> str:
    """The first line of what Ray says, which are many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def launcher_of(config: KunServeConfig, run_folder: Path | None) -> RayLauncher:
    """What ``--cluster ray`` asks for; raises ConfigError for a name that Ray does not take."""
    name = config.cluster.ray_name or str(config.server.port)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"--ray-name is of letters, digits, '.', '_' and '-', not {name!r}")
    return RayLauncher(
        Session(config.cluster.ray_address),
        config.cluster.ray_placement,
        is_detached=run_folder is not None,
        autoscales=config.cluster.ray_autoscaling,
        name=None if run_folder is None else name,
    )
