"""An instance that tells where its loop's thread spends its time, for `step_overhead`.

LocalLauncher((path of this file, folder))

Every kernel call, and every part of a step beside the kernels, is timed on the clock of the thread
that makes it. What one part calls of another one is the other one's. After every work that the
instance's loop gives to its body, `account-N` in the folder may have a line: the time of day, that
of the loop's thread, how many steps of layers there were, and the time of each part.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kunserve.cluster.instance import long_steps
from kunserve.cluster.instance.start import Loaded, run_instance
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.engine.cpu.kernels import library

WRITTEN_EVERY_S = 0.1
KERNELS = "kernels"
PARTS: dict[str, tuple[str, ...]] = {
    "reads mail": ("cluster.instance.post:Post.read",),
    "reads peers' mail": ("cluster.instance.post:Post.read_peers",),
    "sends": (
        "cluster.instance.post:Post.send",
        "cluster.instance.post:Post.send_to_front",
    ),
    "reports": ("cluster.instance.loop:InstanceLoop._report_if_due",),
    "chooses and plans": ("control.group.scheduler:Scheduler.schedule",),
    "names blocks": ("control.instance.agent:InstanceAgent._localize",),
    "agent, rest": (
        "control.instance.agent:InstanceAgent.next_work",
        "control.instance.agent:InstanceAgent.finished",
        "control.instance.agent:InstanceAgent.on",
    ),
    "completes": ("control.group.scheduler:Scheduler.complete",),
    "arrays of the batch": ("engine.body:build_batch", "engine.body:entry_bounds"),
    "embeds": ("engine.cpu.decoder:Decoder.embed",),
    "layers, beside the kernel": (
        "engine.cpu.decoder:Decoder.forward",
        "engine.cpu.decoder:Decoder.run_whole",
        "engine.cpu.decoder:Decoder.run_fused",
    ),
    "logits, beside the kernels": (
        "engine.cpu.decoder:Decoder.logits",
        "engine.cpu.split_head:SplitHead.part",
    ),
    "samples": (
        "engine.sampling.sampler:Sampler.sample",
        "engine.sampling.sampler:Sampler.sample_found",
        "engine.sampling.sampler:Sampler.sample_largest",
    ),
    "body, rest": (
        "engine.body:EngineBody.execute",
        "engine.body:EngineBody.head_part",
        "engine.body:EngineBody.sample",
    ),
}
"""What is timed, below ``kunserve``. What a checkout does not have is left out."""

_spent_s = dict.fromkeys((KERNELS, *PARTS), 0.0)
_stack: list[str] = []
_turned_s = 0.0
"""When the part on top of the stack went on."""


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and its time is that of the part."""

    def timed_call(*arguments: Any, **options: Any) -> Any:
        global _turned_s
        now_s = time.thread_time()
        if _stack:
            _spent_s[_stack[-1]] += now_s - _turned_s
        _stack.append(part)
        _turned_s = now_s
        try:
            return call(*arguments, **options)
        finally:
            now_s = time.thread_time()
            _spent_s[_stack.pop()] += now_s - _turned_s
            _turned_s = now_s

    return timed_call


def time_kernels() -> None:
    """Before anything has looked a kernel up."""
    loaded = library.library()
    plain = library.kernel
    cache: dict[tuple[str, Any], Callable[..., Any]] = {}

    def kernel(name: str, dtype: Any) -> Callable[..., Any]:
        if (name, dtype) not in cache:
            cache[name, dtype] = timed(KERNELS, plain(name, dtype))
        return cache[name, dtype]

    found: Any = library
    found.kernel = kernel
    for name in ("kun_argmax", "kun_largest", "kun_pick_rows", "kun_entry_bounds"):
        if not hasattr(loaded, name):
            continue
        setattr(loaded, name, timed(KERNELS, getattr(loaded, name)))


def time_parts() -> None:
    """Before an instance is assembled."""
    for part, places in PARTS.items():
        for place in places:
            module, _, path = place.partition(":")
            owner: Any = import_module(f"kunserve.{module}")
            *owners, name = path.split(".")
            for one in owners:
                owner = getattr(owner, one, None)
            if hasattr(owner, name):
                setattr(owner, name, timed(part, getattr(owner, name)))


class TimedBody:
    """A body that writes accounts. Everything else is the body's own."""

    def __init__(self, body: Any, path: Path) -> None:
        self._body = body
        self._file = path.open("w", buffering=1)
        self._num_steps = 0
        self._written_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """What needs no account."""
        return getattr(self._body, name)

    def execute(self, *arguments: Any) -> Any:
        """As the body's own."""
        found = self._body.execute(*arguments)
        self._num_steps += 1
        now_s = time.monotonic()
        if now_s - self._written_s > WRITTEN_EVERY_S:
            self._written_s = now_s
            account = (now_s, time.thread_time(), self._num_steps, _spent_s)
            self._file.write(json.dumps(account) + "\n")
        return found


def _load(order: InstanceOrder) -> Loaded:
    time_kernels()
    from kunserve.cluster.instance.main import load_model  # looks kernels up

    time_parts()
    # On a machine with much else to do steps last, and would be a call for each layer.
    long_steps.LONG_STEP_S = 10.0
    loaded = load_model(order)
    path = Path(sys.argv[1]) / f"account-{order.instance_id}-{os.getpid()}"
    body: Any = TimedBody(loaded.body, path)
    return loaded._replace(body=body)


if __name__ == "__main__":
    sys.exit(run_instance(_load))
