"""Ray's calls that KunServe makes, without Ray: actors live in this process, nodes are records."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


class RayError(Exception):
    """As Ray's."""


class RayActorError(RayError):
    """The actor is dead."""


class ActorUnavailableError(RayActorError):
    """It may be."""


class GetTimeoutError(RayError, TimeoutError):
    """It took too long."""


@dataclass
class Node:
    """What a test says of one."""

    ip: str
    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    is_alive: bool = True


class Ref:
    """An answer under way: begun at once, unless somebody wants it this moment."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        at_once: Callable[[], Coroutine[Any, Any, Any]],
    ) -> None:
        self._work = work
        self._at_once = at_once
        self._task: asyncio.Task[Any] | None = None
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> asyncio.Task[Any]:
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._task

    def __await__(self) -> Any:
        return asyncio.shield(self._begin()).__await__()

    def now(self) -> Any:
        """Of a call that waits for nothing."""
        work = self._at_once()
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        work.close()
        raise GetTimeoutError


class Actor:
    """A handle, and what it is a handle of."""

    def __init__(self, ray: "FakeRay", kind: type, options: dict[str, Any]) -> None:
        self._ray = ray
        self._kind = kind
        self.options = options
        self.node: Node | None = None
        self.body: Any = None
        self.over = asyncio.Event()
        self._placed = asyncio.Event()

    def place(self, node: Node) -> None:
        self.node = node
        self._ray.current = self
        self.body = self._kind()
        self._ray.current = None
        self._placed.set()

    def need(self) -> dict[str, float]:
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        return {ray: self.options[mine] for mine, ray in names.items() if mine in self.options}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        class Method:
            def remote(method, *args: Any) -> Ref:
                self._ray.carried.append((name, args))
                return Ref(lambda: self._call(name, args), lambda: getattr(self.body, name)(*args))

        return Method()

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        over = asyncio.ensure_future(self.over.wait())
        work = asyncio.ensure_future(self._run(name, args))
        try:
            await asyncio.wait({over, work}, return_when=asyncio.FIRST_COMPLETED)
            if self.over.is_set() and (name != "end" or not work.done()):
                raise RayActorError("The actor died.\nMany words follow.")
            return work.result()
        finally:
            over.cancel()
            work.cancel()

    async def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        if not self.over.is_set():
            await self._placed.wait()
        answer = await getattr(self.body, name)(*args)
        self._ray.carried.append((name, (answer,)))
        return answer

    def die(self) -> None:
        """Its process is gone, and the instance's with it, as the system sees to."""
        if not self.over.is_set():
            self.over.set()
            process = getattr(self.body, "_process", None)
            if process is not None:
                process.kill()
            if self.body is not None and self.body._watch is not None:
                self.body._watch.cancel()
            self._ray.place_all()


class FakeRay:
    """A cluster. ``installed`` puts it where ``import ray`` finds it."""

    def __init__(self, *nodes: Node) -> None:
        self.carried: list[tuple[str, tuple[Any, ...]]] = []
        """What actors were asked, and what they answered."""
        self.nodes = list(nodes)
        self.actors: list[Actor] = []
        self.requests: list[list[dict[str, float]]] = []
        """What the autoscaler was told."""
        self.inits: list[dict[str, Any]] = []
        self.init_error: Exception | None = None
        self.current: Any = None

    def place_all(self) -> None:
        """Give actors that wait a node, the emptiest one that has room."""
        for actor in self.actors:
            if actor.node is not None or actor.over.is_set():
                continue
            need = actor.need()
            fits = [n for n in self.nodes if n.is_alive and self._has_room(n, need)]
            if fits:
                actor.place(min(fits, key=lambda node: len(self.on(node))))

    def _has_room(self, node: Node, need: dict[str, float]) -> bool:
        used = [actor.need() for actor in self.on(node)]
        return all(
            node.resources.get(name, 0.0) >= amount + sum(one.get(name, 0.0) for one in used)
            for name, amount in need.items()
        )

    def on(self, node: Node) -> list[Actor]:
        """Actors that live there."""
        return [a for a in self.actors if a.node is node and not a.over.is_set()]

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.over.is_set()]

    def kill_node(self, node: Node) -> None:
        node.is_alive = False
        for actor in self.on(node):
            actor.die()

    # What `import ray` finds

    def _remote(self, kind: type) -> Any:
        class Made:
            @staticmethod
            def options(**options: Any) -> Any:
                class Class:
                    @staticmethod
                    def remote() -> Actor:
                        if options.get("get_if_exists"):
                            for found in FakeRay.now.living:
                                if found.options["name"] == options["name"]:
                                    return found
                        actor = Actor(FakeRay.now, kind, options)
                        FakeRay.now.actors.append(actor)
                        FakeRay.now.place_all()
                        return actor

                return Class

        return Made

    def _init(self, **told: Any) -> None:
        self.inits.append(told)
        if self.init_error is not None:
            raise self.init_error

    def _get_actor(self, name: str, namespace: str) -> Actor:
        for actor in self.living:
            if actor.options["name"] == name and actor.options["namespace"] == namespace:
                return actor
        raise ValueError(name)

    front_ip = "127.0.0.1"

    def here(self) -> str:
        """Address of the node where an actor is made; of the front's machine otherwise."""
        return self.front_ip if self.current is None else str(self.current.node.ip)

    def get_runtime_context(self) -> Any:
        class Context:
            current_actor = self.current

            @staticmethod
            def get_node_labels() -> dict[str, str]:
                return dict(self.current.node.labels)

        return Context()

    now: "FakeRay"
    """The one that is installed: modules that imported Ray keep what they have imported."""


def _modules() -> dict[str, ModuleType]:
    ray, exceptions, util = (ModuleType(n) for n in ("ray", "ray.exceptions", "ray.util"))
    autoscaler, sdk = ModuleType("ray.autoscaler"), ModuleType("ray.autoscaler.sdk")
    found: Any = ray
    found.remote = lambda kind: FakeRay.now._remote(kind)
    found.init = lambda **told: FakeRay.now._init(**told)
    found.shutdown = lambda: None
    found.nodes = lambda: [
        {"NodeManagerAddress": n.ip, "Resources": n.resources, "Alive": n.is_alive}
        for n in FakeRay.now.nodes
    ]
    found.get = lambda ref, timeout: ref.now()
    found.get_actor = lambda name, namespace: FakeRay.now._get_actor(name, namespace)
    found.kill = lambda actor, no_restart: actor.die()
    found.get_runtime_context = lambda: FakeRay.now.get_runtime_context()
    found.util, found.exceptions, found.autoscaler = util, exceptions, autoscaler
    wide: Any = util
    wide.get_node_ip_address = lambda: FakeRay.now.here()
    wide.list_named_actors = lambda: [a.options["name"] for a in FakeRay.now.living]
    kinds: Any = exceptions
    for kind in (RayError, RayActorError, ActorUnavailableError, GetTimeoutError):
        setattr(kinds, kind.__name__, kind)
    asks: Any = sdk
    asks.request_resources = lambda bundles: FakeRay.now.requests.append(bundles)
    return {m.__name__: m for m in (ray, exceptions, util, autoscaler, sdk)}


@contextmanager
def installed(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """``import ray`` finds the fake, whether there is a real one or not."""
    FakeRay.now = fake
    with monkeypatch.context() as patch:
        ours = [n for n in sys.modules if n.startswith(("ray.", "kunserve_extras.ray"))]
        for name in (*ours, "ray"):
            patch.delitem(sys.modules, name, raising=False)
        for name, module in _modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "")
        yield fake
        for name in [n for n in sys.modules if n.startswith("kunserve_extras.ray")]:
            patch.delitem(sys.modules, name, raising=False)
