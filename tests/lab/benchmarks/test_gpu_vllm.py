"""Two phases of the day on a GPU have vLLM's classes: rehearsed where vLLM is installed."""

import json
import shlex
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu_phases import vllm_burst, vllm_identity
from benchmarks.gpu_phases.machine import MIB, Machine
from benchmarks.gpu_phases.models import serving_model
from benchmarks.report import Report
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.devices import open_backend
from kunserve.engine.memory.wrap import wrap
from kunserve.model.source import resolve_model
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve_lab.compare.experiment_file import read_experiment
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


def commands_in(folder: Path) -> dict[str, list[str]]:
    """What P11 starts, without the interpreter."""
    machine = Machine.named("fake", folder)
    path = vllm_burst.write_experiment(machine, serving_model(machine)[0], 2 * MIB)
    others = read_experiment(path).others
    return {name: shlex.split(one.command.format(port=1))[3:] for name, one in others.items()}


def test_our_servers_of_a_burst_know_their_flags(tmp_path: Path) -> None:
    found = {}
    for name, (first, *words) in commands_in(tmp_path).items():
        if first == "serve":
            context = serve_command.make_context("serve", words)
            found[name] = config_from_flags(context.params)
    assert {name: one.overload.policy for name, one in found.items()} == {
        "vllm-body": "recompute",
        "vllm-body-drop": "drop",
    }
    assert all(one.instance.engine == "vllm" for one in found.values())


@NEEDS_VLLM
def test_vllm_knows_the_flags_of_a_burst(tmp_path: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = commands_in(tmp_path)["vllm-rr"]
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert (found.load_format, found.kv_cache_memory_bytes) == ("dummy", 2 * MIB)


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
