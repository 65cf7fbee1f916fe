"""Two phases of the day on a GPU have vLLM's classes: rehearsed where vLLM is installed."""

import json
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu_phases import vllm_burst, vllm_identity
from benchmarks.gpu_phases.machine import Machine
from benchmarks.report import Report
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.devices import open_backend
from kunserve.engine.memory.wrap import wrap
from kunserve.model.source import resolve_model
from tests.direct_engine import DirectEngine
from tests.running.engines import NEEDS_VLLM

NUM_TOKENS = 40


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
    assert freed[0] > 0 > freed[1]


@NEEDS_VLLM
def test_its_model_would_show_a_wrong_byte(tmp_path: Path) -> None:
    """Else equal tokens said nothing: those of random weights repeat themselves."""
    machine = Machine.named("fake", tmp_path)
    spec = vllm_identity.shape_of(machine)
    config = vllm_identity.config_of(machine, spec)
    prompts = vllm_identity.prompts_of(spec)
    whole, last = LayerRange(0, spec.num_layers), LayerRange(spec.num_layers - 1, spec.num_layers)
    number, source = InstanceId(0), resolve_model(config.model.model, load_format="dummy")
    backend = open_backend(config.model, source, config.instance, number)
    opened = EngineBody(number, config.model, config.instance, source, backend=backend)
    with closing(opened) as body:
        engine = DirectEngine([(body, whole)])
        calm = engine.generate(prompts, NUM_TOKENS)
        body.memory.drop(LayerRange(0, last.first))
        body.memory.reclaim(whole)
        body.load_layers(last)
        assert engine.generate(prompts, NUM_TOKENS) == calm
        shard = body.memory.shards[0]
        layout = shard.layout
        address = shard.weights.base_address + layout.layer_offset(last.first)
        restored = wrap(address, layout.layer_bytes, torch.device("cpu")).view(torch.int16)
        restored[43_261] ^= 0x0300  # the upper byte of a weight of attention: its exponent
        assert engine.generate(prompts, NUM_TOKENS) != calm
