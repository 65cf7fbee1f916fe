"""Two phases of the day on a GPU have vLLM's classes: rehearsed where vLLM is installed."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu_phases import vllm_burst, vllm_identity
from benchmarks.gpu_phases.machine import Machine
from benchmarks.report import Report
from tests.running.engines import NEEDS_VLLM


def figures(
    phase: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    with Report("rehearsal") as report:
        phase.run(Machine.named("fake", folder), report)
    lines = capsys.readouterr().out.splitlines()
    return [one for one in map(json.loads, lines) if "name" in one]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("phase", [vllm_identity, vllm_burst])
def test_without_it_they_say_so(
    phase: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(phase, tmp_path, capsys)
    assert {one["name"] for one in found} == {"not there"}
    assert all("needs vLLM" in one["settings"]["why"] for one in found)


@NEEDS_VLLM
def test_tokens_over_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = figures(vllm_identity, tmp_path, capsys)
    found = {one["name"]: one["value"] for one in said}
    freed = [one["value"] for one in said if one["name"] == "freed"]
    assert found["other tokens through the drop"] == 0
    assert freed[0] > 0 > freed[1] and found["kinds of tokens"] > 4
