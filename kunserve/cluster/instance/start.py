"""What every instance process does, whatever its body: read its order, assemble, serve."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from kunserve.cluster.instance.device_loop import DeviceLoop
from kunserve.cluster.instance.lease import Hold, Lease
from kunserve.cluster.instance.loop import InstanceLoop
from kunserve.cluster.instance.mover import InstanceMover, LayerLoader
from kunserve.cluster.instance.wire_lease import LEASE_PART, WireLease
from kunserve.cluster.instance.wired_body import WiredBody
from kunserve.cluster.log_format import start_logging
from kunserve.cluster.processes.front_address import FrontAddress, lines_of
from kunserve.cluster.processes.launch import InstanceOrder, LastWords
from kunserve.cluster.trace import instance_trace
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.state import AgentConfig
from kunserve.core.errors import KunServeError, StartupFailure
from kunserve.core.extras import find_extra
from kunserve.core.faults import EXIT_LOST_MESSAGES, EXIT_MACHINE_FAILED, Fault, fault_of
from kunserve.core.messages import Ready
from kunserve.core.transfer import PeerAddress
from kunserve.transport.peers.links import PeerLinks
from kunserve.transport.wire.channel import InstanceChannel
from kunserve.transport.wire.codec import LostMessages
from kunserve.transport.wire.socket_folder import address_in

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
EXIT_REFUSED = 3
"""The process could not start and said why."""
EXIT_ORPHANED = 4
"""Its parent died before the process could ask to die with it."""


class Loaded(NamedTuple):
    """A body that is ready to serve."""

    body: WiredBody
    eos_token_ids: frozenset[int]
    longest_request_tokens: int
    summary: str
    """Weights, KV blocks and the longest request, for people."""


def run_instance(load: Callable[[InstanceOrder], Loaded]) -> int:
    """Read the order from standard input, load, serve until told to stop; the exit code.

    The process dies with its parent, or by the terms of its lease. A ConfigError while loading
    is written to standard output.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = lines_of(sys.stdin.fileno())
    order = msgspec.json.decode(next(lines, b""), type=InstanceOrder)
    front_address = FrontAddress(order.front_address)
    if order.network is not None:
        front_address.follow(lines)
    # A stopped process could not see that its lease is over: the parent's death wakes it.
    dies = order.lease is None or order.parent_pid is not None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if dies else signal.SIGCONT)
    if order.parent_pid not in (None, os.getppid()):
        return EXIT_ORPHANED  # it died before the line above: its death gives no signal
    lease = _lease_of(order)
    start_logging(order.plan.config.log, order.instance_id)
    threading.excepthook = _end_by
    try:
        loop = _assemble(order, load(order), lease, front_address)
    except KunServeError as error:
        _say(StartupFailure.of(error))
        return EXIT_REFUSED
    # What a start has made stays. Looking through it all again would hold up a step.
    gc.collect()
    gc.freeze()
    try:
        return _run(loop)
    finally:
        threading.excepthook = threading.__excepthook__  # threads end in any way now


def _lease_of(order: InstanceOrder) -> Hold | None:
    if order.lease is None:
        return None
    if order.network is None:
        return Lease(order.lease)
    return WireLease(order.lease, LEASE_PART * order.plan.config.cluster.heartbeat_timeout_s)


def _run(loop: InstanceLoop) -> int:
    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who asks twice wants it now
        loop.leave()

    signal.signal(signal.SIGTERM, leave)
    try:
        loop.run()
    except LostMessages as error:
        logger.error("leaving: of the front's messages some are lost: %s", error)
        return EXIT_LOST_MESSAGES
    except SystemExit:
        raise  # its code tells
    except BaseException as error:
        fault = fault_of(error)
        _say(LastWords(fault, loop.requests_of_step if fault is Fault.REQUEST else ()))
        raise
    return 0


def _end_by(failure: threading.ExceptHookArgs) -> None:
    """A thread of this process has failed: nobody would look after what it kept."""
    name = None if failure.thread is None else failure.thread.name
    logger.critical("leaving: a thread has failed name=%s", name, exc_info=failure.exc_value)
    os._exit(EXIT_MACHINE_FAILED)


def _say(last_words: StartupFailure | LastWords) -> None:
    with contextlib.suppress(OSError):  # the front that read it may have died
        sys.stdout.buffer.write(msgspec.json.encode(last_words))
        sys.stdout.buffer.flush()


def address_for(kind: str, order: InstanceOrder) -> str:
    """Of a socket of this process, whose number keeps it apart from the one that it replaces."""
    return address_in(order.socket_folder, f"{kind}-{order.instance_id}-{os.getpid()}")


def _assemble(
    order: InstanceOrder, loaded: Loaded, lease: Hold | None, front_address: FrontAddress
) -> InstanceLoop:
    config, body, network = order.plan.config, loaded.body, order.network
    spec = body.spec
    longest = loaded.longest_request_tokens
    max_model_len = min(longest, config.model.max_model_len or longest)
    links_at, bulk_at = (address_for(kind, order) for kind in ("links", "bulk"))
    link_gbps = order.place.link_gbps
    mover = InstanceMover(
        spec.instance_id, bulk_at, body.memory, link_gbps=link_gbps, network=network
    )
    mover.loader = LayerLoader(body.load_layers)
    peers = PeerLinks(spec.instance_id, links_at, network=network)
    mover.yield_to(peers.activations_pending)
    channel = InstanceChannel(front_address, spec.instance_id, network)
    agent = InstanceAgent(
        AgentConfig(
            spec.instance_id,
            config.scheduler,
            order.plan.measured,
            loaded.eos_token_ids,
            max_model_len,
        ),
        body,
        mover,
    )
    address = PeerAddress(peers.address, mover.address, maps=mover.maps)
    if network is not None:
        address = address._replace(public_key=network.public_key, machine=network.machine)
    ready = Ready(replace(spec, place=order.place), address, max_model_len, loaded.summary)
    channel.send(ready)
    trace = instance_trace(config.cluster.trace_out, spec.instance_id)
    kv_events, endpoint = None, config.log.kv_events_endpoint
    if endpoint is not None:
        extra = find_extra("kv_events", "zmq", "--kv-events-endpoint")
        kv_events = extra(endpoint, int(spec.instance_id), spec.block_size)
    kind = DeviceLoop if body.computes_aside else InstanceLoop
    return kind(agent, body, channel, peers, mover, config.cluster, ready, lease, trace, kv_events)
