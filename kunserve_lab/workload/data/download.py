"""Downloads of public files: whole, checked, or not at all."""

import hashlib
import http.client
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.workload.data.catalog import DataSet, file_of

TIMEOUT_S = 30.0


def fetch(data: DataSet, cache: Path | None = None) -> Path:
    """Download the data set unless its file is there already, and return the file.

    Raises ConfigError when it cannot be had or is not the expected content; the cache is then as
    it was.
    """
    path, source = file_of(data, cache), data.download
    assert path is not None and source is not None, f"{data.name} is no download"
    if path.exists():
        content = path.read_bytes()
    else:
        try:
            with urllib.request.urlopen(source.url, timeout=TIMEOUT_S) as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"cannot download {data.name}: {_reason(error)}. Without a network, put the file "
                f"of {source.url} at {path}"
            ) from None
    if blob_of(content) != source.blob:
        found = path if path.exists() else source.url
        raise ConfigError(f"{found} is not the expected file (its git blob is not {source.blob})")
    if not path.exists():
        _write(path, content)
    return path


def blob_of(content: bytes) -> str:
    """git's name of a file with this content."""
    head = b"blob %d\0" % len(content)
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(content)
        Path(part.name).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
