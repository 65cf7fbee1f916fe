"""What a model's makers recommend to sample with: ``generation_config.json``."""

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from kunserve.core.errors import ModelFiles
from kunserve.model.source import ModelSource

FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Stand for what a request leaves open; None where the model's makers say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Of an answer at most, if the request names no length."""

    @property
    def shown(self) -> str:
        """For a log line: what is set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return " ".join(f"{name}={value:g}" for name, value in values.items() if value is not None)


_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "max_new_tokens": (1, 2**31),
}


def read_sampling_defaults(source: ModelSource) -> SamplingDefaults:
    """The recommendations of a Hugging Face folder; none where there is no such file.

    Raises ModelFiles for a file that is no JSON object, or holds a value that cannot be sampled
    with.
    """
    path = source.path / FILE_NAME
    if not path.is_file():
        return SamplingDefaults()
    try:
        given = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelFiles(f"{path}: not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ModelFiles(f"{path}: not a JSON object")
    values = {name: given[name] for name in _BOUNDS if given.get(name) is not None}
    for name, value in values.items():
        if not _is_usable(name, value):
            raise ModelFiles(
                f"{path}: {name} is {value!r} (--generation-config vllm ignores the file)"
            )
    return SamplingDefaults(**values)


def _is_usable(name: str, value: Any) -> bool:
    low, high = _BOUNDS[name]
    is_number = type(value) is int or (type(value) is float and isinstance(low, float))
    return is_number and math.isfinite(value) and low <= value <= high
