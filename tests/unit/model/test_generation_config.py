"""Defaults of sampling from a model's folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from kunserve.core.errors import ModelFiles
from kunserve.model.generation_config import SamplingDefaults, read_sampling_defaults
from kunserve.model.source import ModelSource


def read(folder: Path, content: Any) -> SamplingDefaults:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return read_sampling_defaults(ModelSource("m", folder, "safetensors"))


def test_what_the_file_says(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": 2}
    defaults = read(tmp_path, given | {"max_new_tokens": 100, "repetition_penalty": None})
    assert defaults == SamplingDefaults(0.6, 0.9, 20, max_new_tokens=100)
    assert defaults.shown == "temperature=0.6 top_p=0.9 top_k=20 max_new_tokens=100"


def test_no_file_is_no_recommendation(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "model.gguf"):
        source = ModelSource("m", path, "safetensors")
        assert read_sampling_defaults(source) == SamplingDefaults()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": 1.5},
        {"min_p": True},
        {"repetition_penalty": 1e-38},
        {"max_new_tokens": 0},
    ],
)
def test_what_cannot_be_sampled_with(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ModelFiles, match=r"generation_config\.json"):
        read(tmp_path, content)
