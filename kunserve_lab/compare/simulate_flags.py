"""From ``kunserve simulate``'s flags to an experiment."""

import dataclasses
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from kunserve.core.errors import ConfigError
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.flag_values import names, numbers
from kunserve_lab.compare.output.map_output import show_map
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.rate import filling_rate
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.sim.devices import DEVICES
from kunserve_lab.sim.models import MODELS

DEFAULT_LENGTHS = Path("longbench")
"""Long documents and summaries: KV memory runs out before compute does."""
DEFAULT_MAX_TOTAL_TOKENS = 32768
_OUTPUT_FLAGS = {"experiment", "output", "save_requests", "chrome_trace", "jobs", "fresh", "map"}
_OVERRIDES = {"compare", "scale", "seed"}
"""Flags that replace what an experiment file says."""


def start(flags: dict[str, Any], given: Collection[str]) -> None:
    """Do what the flags ask. ``given`` are those that were on the command line."""
    if flags["show_list"]:
        _print_list()
        return
    path: Path | None = flags["experiment"]
    experiment = _from_flags(flags) if path is None else _from_file(path, flags, given)
    if flags["map"]:
        with_traffic = path is not None or bool({"trace", "request_rate"} & set(given))
        show_map(experiment, with_traffic, flags["output"])
        return
    options = Options(
        save_requests=flags["save_requests"],
        chrome_trace=flags["chrome_trace"],
        num_jobs=flags["jobs"],
        is_fresh=flags["fresh"],
    )
    compare(experiment, flags["output"], options)


def _from_file(path: Path, flags: dict[str, Any], given: Collection[str]) -> Experiment:
    clash = sorted(set(given) - _OUTPUT_FLAGS - _OVERRIDES)
    if clash:
        raise ConfigError(f"--{clash[0].replace('_', '-')} belongs into {path}")
    experiment = read_experiment(path)
    if experiment.world is World.REAL:
        raise ConfigError(f"{path} is of the real world: kunserve compare {path}")
    return replace(experiment, **_asked(flags, given))


def _from_flags(flags: dict[str, Any]) -> Experiment:
    fields = {field.name for field in dataclasses.fields(SimulatedSetup)} & set(flags)
    setup = SimulatedSetup(
        **{name: flags[name] for name in fields - {"kills"}},
        kills=tuple(_kill(text) for text in flags["kills"]),
    )
    workload = WorkloadSettings(
        trace=flags["trace"],
        lengths=flags["lengths"],
        format=flags["trace_format"],
        start_s=flags["trace_start"],
        end_s=flags["trace_end"],
        duration_s=flags["duration"],
        max_total_tokens=flags["max_total_tokens"],
        turns=flags["turns"],
        system_tokens=flags["system_tokens"],
        turn_tokens=flags["turn_tokens"],
        answer_tokens=flags["answer_tokens"],
        think_s=flags["think_s"],
    )
    if workload.turns is not None:
        workload = _with_rate(workload, flags["request_rate"])
    elif workload.trace is None:
        workload = _built_in(setup, workload, flags["request_rate"])
    return Experiment(setup, workload, title="Simulation", **_asked(flags, _OVERRIDES))


def _with_rate(workload: WorkloadSettings, rate: float | None) -> WorkloadSettings:
    if workload.trace is not None:
        raise ConfigError("--turns makes conversations: it does not go with --trace")
    if rate is None:
        raise ConfigError("--turns needs --request-rate: turns per second, all conversations")
    return replace(workload, rate=rate)


def _built_in(
    setup: SimulatedSetup, workload: WorkloadSettings, rate: float | None
) -> WorkloadSettings:
    """The built-in window with what was not given: long documents, at a rate that fills memory."""
    if workload.lengths is None:
        tokens = workload.max_total_tokens or DEFAULT_MAX_TOTAL_TOKENS
        workload = replace(workload, lengths=DEFAULT_LENGTHS, max_total_tokens=tokens)
    if rate is None:
        few = workload_of(replace(workload, rate=1.0), 1.0, seed=0)
        rate = filling_rate(build_scenario(setup, few), workload.duration_s)
        print(f"--request-rate {rate:g}: about where the window's spikes fill the KV memory")
    return replace(workload, rate=rate)


def _asked(flags: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The systems, loads and seed that were given."""
    values: dict[str, Any] = {}
    if "compare" in given:
        values["systems"] = names(flags["compare"])
    if "scale" in given:
        values["loads"] = numbers("--scale", flags["scale"])
    if "seed" in given:
        values["seeds"] = (flags["seed"],)
    return values


def _kill(text: str) -> tuple[float, int]:
    moment, _, instance = text.partition(":")
    try:
        return float(moment), int(instance)
    except ValueError:
        raise ConfigError(f"--kill takes SEC:INSTANCE, not {text!r}") from None


def _print_list() -> None:
    print("Models")
    for model in MODELS.values():
        sparse = f", {model.experts_per_token} of {model.num_experts} experts per token"
        print(
            f"  {model.name:30} {model.weights_bytes / 2**30:7.1f} GiB, "
            f"{model.default_num_gpus} GPUs per instance{sparse if model.num_experts else ''}"
        )
    print("Devices")
    for device in DEVICES.values():
        print(
            f"  {device.name:30} {device.memory_bytes / 1e9:.0f} GB, "
            f"{device.peak_flops / 1e12:.0f} TFLOP/s, {device.memory_bytes_per_s / 1e12:.1f} TB/s"
        )
    print("Systems")
    for system in SYSTEMS.values():
        print(f"  {system.name:30} {system.description}")
