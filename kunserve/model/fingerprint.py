"""Whether a model's files are still those that the cluster began with, without reading them."""

import hashlib
from pathlib import Path

from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ModelFiles
from kunserve.model.source import ModelSource, resolve_model

HEADER_BYTES = 64 * 1024
"""Read of each file: names, shapes and types of tensors are there."""


def model_fingerprint(source: ModelSource, *, with_times: bool = True) -> str:
    """Another one when a file that the weights depend on was changed: its size, time or header.

    Copies on several hosts have other times: without them only size and header count. Raises
    ModelFiles when one cannot be read.
    """
    digest = hashlib.sha256(source.weights.encode())
    for path in _files(source):
        try:
            found = path.stat()
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
        except OSError as error:
            raise ModelFiles(f"{path}: cannot be read: {error.strerror}") from error
        changed_ns = found.st_mtime_ns if with_times else 0
        digest.update(f"{path.name} {found.st_size} {changed_ns} ".encode())
        digest.update(header)
    return digest.hexdigest()


def configured_fingerprint(config: KunServeConfig) -> str:
    """Of the configured model, as every instance is to find it."""
    source = resolve_model(config.model.model, config.model.load_format)
    return model_fingerprint(source, with_times=config.cluster.launcher == "local")


def check_fingerprint(
    source: ModelSource, expected: str | None, *, with_times: bool = True
) -> None:
    """Raise ModelFiles unless the files are those that the other instances have loaded."""
    if expected is None:
        return
    if model_fingerprint(source, with_times=with_times) != expected:
        raise ModelFiles(
            f"{source.path}: not the files that the other instances have loaded (another size, "
            "time of change or header); put those back (cp -p), or start the server again"
        )


def _files(source: ModelSource) -> list[Path]:
    if source.path.is_file():
        return [source.path]
    patterns = ["config.json"]
    if source.weights == "safetensors":
        patterns += ["*.safetensors", "*.safetensors.index.json"]
    return sorted(path for pattern in patterns for path in source.path.glob(pattern))
