"""What ``kunserve observe`` is asked for: the fleet's make, and where its numbers come from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kunserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Made:
    """What the command line says of the replicas."""

    model: str | None = None
    """None: as the servers call it."""
    device: str = "a100"
    gpus_per_instance: int | None = None
    profile: Path | None = None
    """A file of ``kunserve profile``, for replicas on CPUs."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for."""

    made: Made = field(default_factory=Made)
    urls: tuple[str, ...] = ()
    file: Path | None = None
    """A record, instead of servers."""
    prometheus: str | None = None
    since: str = "24h"
    step_s: float = 15.0
    selector: str = ""
    period_s: float = 1.0
    duration_s: float | None = None
    """Of watching; None: until it is told to stop."""
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    record: Path | None = None
    report: Path | None = None
    as_json: bool = False


def settings_of(flags: dict[str, Any]) -> Settings:
    """From the command line. Raises ConfigError."""
    urls = tuple(_address(url) for url in flags["urls"].split(",") if url.strip())
    sources = [bool(urls), flags["file"] is not None, flags["prometheus"] is not None]
    if sum(sources) != 1:
        raise ConfigError("say what to observe: one of --urls, --from and --prometheus")
    asked = [("--urls", url) for url in urls] + [("--prometheus", flags["prometheus"] or "http://")]
    for flag, url in asked:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{flag}: {url!r} must begin with http:// or https://")
    if len(set(urls)) < len(urls):
        raise ConfigError("--urls names a server twice")
    for name, flag in (("duration_s", "--duration"), ("port", "--port"), ("record", "--record")):
        if flags[name] is not None and not urls:
            raise ConfigError(f"{flag} is for watching servers: it goes with --urls")
    if flags["selector"] and flags["prometheus"] is None:
        raise ConfigError("--selector goes with --prometheus")
    made_of = Made.__dataclass_fields__
    made = Made(**{name: flags[name] for name in made_of})
    rest = {name: flags[name] for name in Settings.__dataclass_fields__ if name in flags}
    return Settings(**rest | {"made": made, "urls": urls})


def _address(url: str) -> str:
    """A server's, also where the page's was given."""
    return url.strip().rstrip("/").removesuffix("/metrics").rstrip("/")
