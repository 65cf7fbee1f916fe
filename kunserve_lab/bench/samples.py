"""Prometheus text to a `ServerSample`. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from kunserve_lab.bench.records import ServerSample

_MEAN = {"kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")}
_SUM = {
    "num_running": ("vllm:num_requests_running", "llamacpp:requests_processing"),
    "num_waiting": ("vllm:num_requests_waiting", "llamacpp:requests_deferred"),
    "num_preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "kv_used_blocks": ("kunserve:kv_used_blocks",),
    "kv_capacity_blocks": ("kunserve:kv_capacity_blocks",),
    "kv_demand_blocks": ("kunserve:demand_blocks",),
    "num_drops": ("kunserve:drops_total",),
    "num_restores": ("kunserve:restores_total",),
    "stage_busy_s": ("kunserve:stage_busy_seconds_total",),
    "stage_active_s": ("kunserve:stage_active_seconds_total",),
}


_WANTED = tuple(name for names in (*_MEAN.values(), *_SUM.values()) for name in names)


def parse_prometheus(text: str) -> dict[str, list[float]]:
    """The finite values of each metric that a sample needs, over all its label sets.

    Other lines are not parsed, because a page may have hundreds and is read twice a second. A
    page that is not Prometheus text has no values.
    """
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_WANTED))
    values: dict[str, list[float]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    values[sample.name].append(sample.value)
    except ValueError:
        return {}
    return dict(values)


def server_sample(time_s: float, texts: Iterable[str]) -> ServerSample:
    """One sample of the servers whose ``/metrics`` answered ``texts``.

    Counts are summed over servers and labels. KV usage is used over capacity where the servers
    give both in blocks, else the mean of what they report. A metric that no server has is None.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for text in texts:
        for name, found in parse_prometheus(text).items():
            values[name] += found
    fields: dict[str, float] = {}
    for field, names in (*_SUM.items(), *_MEAN.items()):
        present = next((values[name] for name in names if name in values), None)
        if present:
            fields[field] = sum(present) / (len(present) if field in _MEAN else 1)
    capacity = fields.get("kv_capacity_blocks")
    if capacity and "kv_used_blocks" in fields:
        fields["kv_usage"] = fields["kv_used_blocks"] / capacity
    return ServerSample(time_s, **fields)
