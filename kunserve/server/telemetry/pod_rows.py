"""The whole server as one series each: gateways take the first series of a name."""

from kunserve.server.telemetry.cluster_rows import Look, waiting_of
from kunserve.server.telemetry.metric_row import Row, gauge


def _pod_blocks(look: Look) -> int:
    return sum(load.capacity_blocks for load in look.loads)


def _block_size(look: Look) -> str:
    return str(next((one.spec.block_size for one in look.state.instances), 0))


POD_ROWS: tuple[Row[Look], ...] = (
    gauge(
        "kunserve:pod_requests_waiting",
        "Requests waiting to run, in all: one series, for gateways that take the first.",
        lambda look: sum(waiting_of(look).values()),
    ),
    gauge(
        "kunserve:pod_requests_running",
        "Requests that run, in all.",
        lambda look: sum(load.num_running for load in look.loads),
    ),
    gauge(
        "kunserve:pod_kv_usage_ratio",
        "Used share of all KV memory, 0 to 1. A drop lowers it at once.",
        lambda look: sum(load.used_blocks for load in look.loads) / max(1, _pod_blocks(look)),
    ),
    gauge(
        "kunserve:pod_cache_info",
        "Always 1; its labels are the block size and the blocks of all groups now.",
        lambda look: {(_block_size(look), str(_pod_blocks(look))): 1.0},
        "block_size",
        "num_gpu_blocks",
    ),
)
