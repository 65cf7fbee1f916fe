"""A server's ``/metrics`` page as readings of its replicas. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kunserve.core.errors import KunServeError
from kunserve_lab.observer.readings.histogram import Histogram, from_cumulative
from kunserve_lab.observer.readings.names import DATA_RANK, DIALECTS, Dialect, series_names

MOST_VALUE = 1e15
"""Of a sample, about where floats end to count by ones: what says more counts nothing."""


class PageError(KunServeError):
    """What was read is not what an observer needs. The message says what to do."""


class Series(NamedTuple):
    """One sample of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One replica at one moment. A number that its server does not give is missing or None."""

    replica: str
    time_s: float
    """Since the epoch."""
    kind: str
    """Of the server: a `Dialect`'s name."""
    model: str
    num_running: float
    num_waiting: float
    kv_usage: float
    """Share of its KV memory, 0 to 1."""
    capacity_blocks: int
    block_size: int
    cache_dtype: str = ""
    caches_prefixes: bool = True
    """Whether a preempted request finds what is left of its KV. Servers that say nothing do."""
    counters: dict[str, float] = field(default_factory=dict)
    """By `names.COUNTERS`: totals since the server began."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """By `names.HISTOGRAMS`; the same."""

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that it holds."""
        return self.capacity_blocks * self.block_size

    @property
    def num_inside(self) -> float:
        """Requests that it has."""
        return self.num_running + self.num_waiting


def parse_page(text: str, replica: str, time_s: float) -> list[Reading]:
    """The replicas behind one page: one for each engine that counts its own requests.

    Raises PageError.
    """
    prefixes = tuple(dialect.prefix for dialect in DIALECTS)
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(prefixes))
    try:
        families = text_string_to_metric_families(lines)
        found = [
            Series(sample.name, sample.labels, sample.value)
            for family in families
            for sample in family.samples
        ]
    except (ValueError, IndexError, KeyError):
        raise PageError(
            f"{replica}/metrics is no Prometheus text: expected lines such as "
            f"vllm:num_requests_running 3. Is this the server's own port?"
        ) from None
    return readings_of(found, replica, time_s)


def readings_of(series: Sequence[Series], replica: str, time_s: float) -> list[Reading]:
    """The same from samples of one moment. Raises PageError."""
    finite = [one for one in series if abs(one.value) <= MOST_VALUE]
    dialect = next((d for d in DIALECTS if any(s.name in d.running for s in finite)), None)
    if dialect is None:
        known = " nor ".join(f"{d.name}'s ({d.running[0]})" for d in DIALECTS)
        mine = [d for d in DIALECTS if any(one.name.startswith(d.prefix) for one in series)]
        hint = mine[0].advice if mine else "give a server's own address, not a gateway's"
        raise PageError(f"{replica} shows neither {known} numbers of requests: {hint}")
    by_engine: dict[str, list[Series]] = defaultdict(list)
    for one in finite:
        by_engine[one.labels.get("engine", "")].append(one)
    counting = {one.labels.get("engine", "") for one in finite
                if one.name in dialect.counters["finished"]}  # fmt: skip
    if len(counting) < 2 or "all" in counting:
        return [_reading(dialect, finite, replica, time_s)]
    return [
        _reading(dialect, by_engine[engine], f"{replica}#{engine}", time_s)
        for engine in sorted(counting)
    ]


def _reading(dialect: Dialect, series: Sequence[Series], replica: str, time_s: float) -> Reading:
    by_name: dict[str, list[Series]] = defaultdict(list)
    wanted = set(series_names(dialect))
    for one in series:
        if one.name in wanted:
            by_name[one.name].append(one)
    usage = _values(by_name, dialect.kv_usage)
    blocks, block_size, labels = _memory(dialect, by_name)
    if not usage or not blocks:
        lacking = dialect.kv_usage[0] if not usage else (dialect.cache_info or [""])[0]
        raise PageError(f"{replica} does not say {lacking}, and how full its KV memory is must be "
                        f"known: {dialect.advice}")  # fmt: skip
    model = next((s.labels["model_name"] for s in series if "model_name" in s.labels), "")
    histograms = {key: _histogram(by_name, names) for key, names in dialect.histograms.items()}
    counters = {key: _values(by_name, names) for key, names in dialect.counters.items()}
    return Reading(
        replica=replica,
        time_s=time_s,
        kind=dialect.name,
        model=model,
        num_running=max(0.0, sum(_values(by_name, dialect.running))),
        num_waiting=max(0.0, sum(_values(by_name, dialect.waiting))),
        kv_usage=min(1.0, max(0.0, sum(usage) / len(usage))),
        capacity_blocks=blocks,
        block_size=block_size,
        cache_dtype=labels.get("cache_dtype", ""),
        caches_prefixes=labels.get("enable_prefix_caching") != "False",
        counters={key: sum(values) for key, values in counters.items() if values},
        histograms={key: one for key, one in histograms.items() if one is not None},
    )


def _samples(by_name: Mapping[str, Sequence[Series]], names: Iterable[str]) -> Sequence[Series]:
    """Of the first of the names that is there."""
    return next((by_name[name] for name in names if name in by_name), ())


def _values(by_name: Mapping[str, Sequence[Series]], names: Iterable[str]) -> list[float]:
    return [one.value for one in _samples(by_name, names)]


def _memory(
    dialect: Dialect, by_name: Mapping[str, Sequence[Series]]
) -> tuple[int, int, Mapping[str, str]]:
    """KV blocks of all engines together, tokens of one, and what else is said of the memory."""
    sizes = _values(by_name, dialect.block_size)
    tokens: dict[str, float] = {}  # ranks of tensor parallelism all tell of the same memory
    for one in _samples(by_name, dialect.capacity_tokens):
        of = one.labels.get(DATA_RANK, "")
        tokens[of] = max(one.value, tokens.get(of, 0.0))
    if tokens:
        size = max(1, int(sizes[0]) if sizes else 1)
        return int(sum(tokens.values())) // size, size, {}
    if dialect.cache_info is None:
        return 0, 1, {}
    name, blocks_label, size_label = dialect.cache_info
    blocks, size = 0, 1
    labels: Mapping[str, str] = {}
    for one in by_name.get(name, ()):
        count, each = one.labels.get(blocks_label, ""), one.labels.get(size_label, "")
        if count.isdecimal() and each.isdecimal():
            blocks, size = blocks + int(count), max(1, int(each))
            labels = one.labels
    return blocks, size, labels


def _histogram(
    by_name: Mapping[str, Sequence[Series]], names: Iterable[str]
) -> Histogram | None:  # fmt: skip
    for name in names:
        buckets: dict[float, float] = defaultdict(float)
        for one in by_name.get(f"{name}_bucket", ()):
            try:
                buckets[float(one.labels["le"])] += one.value
            except (KeyError, ValueError):
                continue
        total = sum(one.value for one in by_name.get(f"{name}_sum", ()))
        found = from_cumulative(buckets, total)
        if found is not None:
            return found
    return None
