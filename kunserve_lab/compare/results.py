"""Results as data: one line of results.jsonl per run, from either world."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.metrics import PERCENTILES, RunMetrics, tpot_s, ttft_s
from kunserve_lab.bench.readers import ReaderStats
from kunserve_lab.bench.runfile import Run
from kunserve_lab.compare.experiment import Place, World

FULL = 0.97
"""Use of the KV memory from which on no request of common size is admitted."""
_OLDER = {"scale": "load", "ttft_p99.9_s": "ttft_p999_s", "tpot_p99.9_s": "tpot_p999_s"}
"""Keys of older files, and the fields that they are now."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one system. A field that this world, or an older file, does not have is None."""

    world: World
    system: str
    load: float
    seed: int
    round: int
    digest: str
    """Of settings and requests (`settings.digest_of`); empty in older files."""
    provenance: str
    """Where arrivals and lengths come from."""
    num_requests: int
    num_failed: int
    duration_s: float
    request_throughput: float
    output_throughput: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    tpot_p99_s: float
    tpot_p999_s: float
    num_preemptions: int
    num_drops: int
    num_restores: int
    num_shed: int | None = None
    """Of those that failed, requests that were refused with 503; None if none was."""
    mean_kv_usage: float | None = None
    peak_kv_usage: float | None = None
    kv_full_s: float | None = None
    """When the KV memory of all instances together was first full; None if it never was."""
    bubble_ratio: float | None = None
    """None when no pipeline ever ran."""
    lost_tokens: int | None = None
    """Tokens whose KV preemptions threw away."""
    num_migrations: int | None = None
    prefix_hit_rate: float | None = None
    """Share of the prompt tokens whose KV was cached; None if none was."""
    num_ordered: int | None = None
    """Instances started beyond the first ones."""
    num_given_back: int | None = None
    gpu_hours: float | None = None
    moved_gb: float | None = None
    swapped_out_gb: float | None = None
    swapped_back_gb: float | None = None
    pause_p99_s: float | None = None
    """Over requests, of the longest gap within each response; as is the next."""
    longest_pause_s: float | None = None
    readers: tuple[ReaderStats, ...] = ()
    """What readers of some rates see of the answers. Empty in older files."""
    client_lag_s: float | None = None
    """How late the client sent the latest percent of the requests."""
    load_average: tuple[float, float] | None = None
    """Of the machine over a minute, at the run's start and end."""
    left_out: tuple[int, ...] = ()
    """Completed requests, by number, that are in no percentile: another system failed them
    (``groups.on_equal_requests``)."""
    cautions: tuple[str, ...] = ()
    """What a careful reader of the numbers must know."""
    environment: dict[str, object] = dataclasses.field(default_factory=dict)
    """Version and commit; in the real world the machine and the date too."""
    ttft_ms: tuple[int | None, ...] = ()
    """Of every request in order of arrival; None for one that failed. Empty in older files."""
    tpot_ms: tuple[float | None, ...] = ()
    """The same, to a tenth; None too for a request of one token."""

    @property
    def place(self) -> Place:
        """Where the run stands in its experiment."""
        return Place(self.load, self.seed, self.round, self.system)

    @property
    def num_completed(self) -> int:
        """Requests whose whole response came."""
        return self.num_requests - self.num_failed

    @property
    def fingerprint(self) -> str:
        """Twelve digits of what was asked and of what every request met.

        Requests and figures that are kept beside a result say by it of which run they are.
        """
        met = (self.digest, self.duration_s, self.ttft_ms, self.tpot_ms)
        return hashlib.sha256(repr(met).encode()).hexdigest()[:12]

    def percentile_s(self, latency: str, percentile: float) -> float:
        """One of `PERCENTILES` of ``ttft`` or ``tpot``."""
        value = getattr(self, percentile_field(latency, percentile))
        assert isinstance(value, float), (latency, percentile, value)
        return value

    def slowest_s(self, latency: str) -> float | None:
        """The largest ``ttft`` or ``tpot`` of those that percentiles are over; None if not kept."""
        values = getattr(self, f"{latency}_ms")
        kept = [v for at, v in enumerate(values) if v is not None and at not in self.left_out]
        return max(kept) / 1e3 if kept else None


def percentile_field(latency: str, percentile: float) -> str:
    """The field that has one of `PERCENTILES` of ``ttft`` or ``tpot``: ``ttft_p999_s``."""
    return f"{latency}_p{f'{percentile:g}'.replace('.', '')}_s"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run leaves: its line, and what figures are drawn from."""

    result: RunResult
    run: Run
    log: tuple[str, ...] = ()
    """The server's own lines on its drops and restores."""


def result_of(
    world: World, place: Place, digest: str, run: Run, metrics: RunMetrics, **more: Any
) -> RunResult:
    """The line of a run; ``more`` are the fields that depend on the world."""
    latencies = {
        percentile_field(name, percentile): round(
            getattr(metrics, name).percentile_s(percentile), 5
        )
        for name in ("ttft", "tpot")
        for percentile in PERCENTILES
    }
    shares = [s.kv_usage for s in run.samples if s.kv_usage is not None]
    full = (s.time_s for s in run.samples if s.kv_usage is not None and s.kv_usage >= FULL)
    return RunResult(
        world=world,
        system=place.system,
        load=place.load,
        seed=place.seed,
        round=place.round,
        digest=digest,
        provenance=run.provenance,
        num_requests=len(run.records),
        num_failed=metrics.num_failed,
        duration_s=round(metrics.duration_s, 3),
        request_throughput=round(metrics.request_throughput, 4),
        output_throughput=round(metrics.output_throughput, 2),
        mean_kv_usage=round(sum(shares) / len(shares), 4) if shares else None,
        peak_kv_usage=round(max(shares), 4) if shares else None,
        kv_full_s=next(full, None),
        pause_p99_s=round(metrics.pause.percentile_s(99.0), 5),
        longest_pause_s=round(metrics.longest_pause_s, 5),
        readers=tuple(map(_rounded, metrics.readers)),
        ttft_ms=tuple(_whole_ms(ttft_s(r)) if r.succeeded else None for r in run.records),
        tpot_ms=tuple(_tenth_ms(tpot_s(r)) if r.succeeded else None for r in run.records),
        **({"num_shed": sum(r.was_refused for r in run.records) or None} | latencies | more),
    )


def load(path: Path) -> list[RunResult]:
    """The results in a file, or in the ``results.jsonl`` of a folder.

    Reads files of older versions too: what they lack is None, their runs are simulated ones of
    seed 0. Of two lines of the same place the later one counts. A malformed line is named.
    """
    path = path / "results.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    results: dict[Place, RunResult] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.json.decode(line, type=dict[str, object])
            renamed = {_OLDER.get(name, name): value for name, value in values.items()}
            result = msgspec.convert(_OLDER_DEFAULTS | renamed, RunResult)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        results.pop(result.place, None)
        results[result.place] = result
    return list(results.values())


_OLDER_DEFAULTS: dict[str, object] = {"world": "simulated", "seed": 0, "round": 0, "digest": ""}


def append(path: Path, result: RunResult) -> None:
    """Add one line; what is in the file stays as it is."""
    with _writing(path), path.open("ab") as file:
        file.write(_line(result))


def mend(path: Path) -> bool:
    """Take away a last line that a full disk has torn; whether there was one.

    What is appended next would else go on in that line.
    """
    if not path.exists():
        return False
    with _writing(path), path.open("r+b") as file:
        content = file.read()
        rest = content.rpartition(b"\n")[2]
        if not rest:
            return False
        try:
            msgspec.json.decode(rest)
        except msgspec.MsgspecError:
            file.truncate(len(content) - len(rest))
            return True
        file.write(b"\n")  # somebody's editor took it
        return False


def save(path: Path, results: Iterable[RunResult]) -> None:
    """Write the file anew, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with _writing(path):
        partial.write_bytes(b"".join(map(_line, results)))
        partial.replace(path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _line(result: RunResult) -> bytes:
    """One JSON object, without what is not known."""
    values = dataclasses.asdict(result)
    known = {name: v for name, v in values.items() if v is not None and v != () and v != {}}
    return msgspec.json.encode(known) + b"\n"


def _rounded(stats: ReaderStats) -> ReaderStats:
    return ReaderStats(*(round(value, 5) for value in dataclasses.astuple(stats)))


def _whole_ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e3)


def _tenth_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
