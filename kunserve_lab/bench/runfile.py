"""A run as data: one JSON line about it, then one per request and per sample.

A figure is a function of such a file, and so is every number of a report.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.records import RequestRecord, ServerSample

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One experiment's outcome and the conditions it was measured under."""

    label: str
    """Names the run on figures."""
    provenance: str
    """Where arrivals and lengths come from."""
    duration_s: float
    records: tuple[RequestRecord, ...]
    samples: tuple[ServerSample, ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    """The settings of the client, by name."""
    environment: tuple[tuple[str, object], ...] = ()
    """Date, versions, commit, machine of the client."""


def write_run(path: Path, run: Run) -> None:
    """Writes ``run`` as JSON lines; replaces the file whole or not at all."""
    header = {
        "kind": "run",
        "schema": SCHEMA,
        "label": run.label,
        "provenance": run.provenance,
        "duration_s": run.duration_s,
        "config": dict(run.config),
        "environment": dict(run.environment),
    }
    lines: list[dict[str, object]] = [header]
    lines += [{"kind": "request", **_rounded(asdict(record))} for record in run.records]
    lines += [{"kind": "sample", **_known(_rounded(asdict(sample)))} for sample in run.samples]
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_run(path: Path) -> Run:
    """The run that `write_run` wrote. A malformed line is named."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    header: dict[str, object] | None = None
    records: list[RequestRecord] = []
    samples: list[ServerSample] = []
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.json.decode(line, type=dict[str, object])
            match values.pop("kind", None):
                case "run" if header is None and values.get("schema") == SCHEMA:
                    header = values
                case "request":
                    records.append(msgspec.convert(values, RequestRecord))
                case "sample":
                    samples.append(msgspec.convert(values, ServerSample))
                case kind:
                    raise ConfigError(f"{path}, line {number}: unexpected kind {kind!r}")
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if header is None:
        raise ConfigError(f"{path}: not a result of kunserve bench (no line of kind 'run')")
    return Run(
        label=str(header["label"]),
        provenance=str(header["provenance"]),
        duration_s=msgspec.convert(header["duration_s"], float),
        records=tuple(records),
        samples=tuple(samples),
        config=_items(header.get("config")),
        environment=_items(header.get("environment")),
    )


def _items(values: object) -> tuple[tuple[str, object], ...]:
    return tuple(values.items()) if isinstance(values, dict) else ()


def _rounded(values: dict[str, object]) -> dict[str, object]:
    """Times to the microsecond: what the clock can tell, at a third of the size."""
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 6)
        elif isinstance(value, tuple):
            values[name] = [round(item, 6) for item in value]
    return values


def _known(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
