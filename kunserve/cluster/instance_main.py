"""The entry point of an instance process (``python -m kunserve.cluster.instance_main``)."""

import ctypes
import logging
import signal
import sys

import msgspec

from kunserve.cluster.instance_loop import InstanceLoop, WiredBody
from kunserve.cluster.launch import InstanceOrder, StartupFailure
from kunserve.control.agent import InstanceAgent
from kunserve.control.seat import AgentConfig
from kunserve.core.errors import KunServeError
from kunserve.core.messages import Ready
from kunserve.engine.body import CpuBody
from kunserve.model.config import read_eos_ids
from kunserve.model.source import resolve_model
from kunserve.transport.bulk import BulkMover
from kunserve.transport.channel import InstanceChannel
from kunserve.transport.peers import PeerLinks

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Read the order from standard input, load, serve until told to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=InstanceOrder)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s instance={order.instance_id} %(message)s",
        stream=sys.stderr,
    )
    try:
        loop = _assemble(order)
    except KunServeError as error:
        failure = StartupFailure(type(error).__name__, str(error))
        sys.stdout.buffer.write(msgspec.json.encode(failure))
        sys.stdout.buffer.flush()
        return 3
    loop.run()
    return 0


def _assemble(order: InstanceOrder) -> InstanceLoop:
    config = order.config
    body, eos_token_ids, max_model_len, summary = _make_body(order)
    spec = body.spec
    mover = BulkMover(spec.instance_id, order.token, body, link_gbps=config.overload.link_gbps)
    peers = PeerLinks(spec.instance_id, order.token, mover)
    channel = InstanceChannel(order.front_address, order.token, spec.instance_id)
    agent = InstanceAgent(
        AgentConfig(spec.instance_id, config.scheduler, eos_token_ids, max_model_len), body, mover
    )
    channel.send(Ready(spec, peers.address, max_model_len, summary))
    return InstanceLoop(agent, body, channel, peers, mover, config.cluster.report_period_s)


def _make_body(order: InstanceOrder) -> tuple[WiredBody, frozenset[int], int, str]:
    """The body, its end-of-sequence tokens, the longest request, and what people should know."""
    config = order.config
    source = resolve_model(config.model.model, config.model.load_format)
    body = CpuBody(order.instance_id, config.model, config.instance, source)
    eos = frozenset(read_eos_ids(source))
    return body, eos, body.account.longest_request_tokens, str(body.account)


if __name__ == "__main__":
    sys.exit(main())
