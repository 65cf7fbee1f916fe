"""From ``kunserve simulate``'s flags to an experiment."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from kunserve.bench.simulate.experiment import run_experiment
from kunserve.bench.simulate.settings import Experiment, Load, Setup, read_experiment
from kunserve.bench.simulate.systems import SYSTEMS
from kunserve.core.errors import ConfigError
from kunserve.sim.devices import DEVICES
from kunserve.sim.models import MODELS

_OUTPUT_FLAGS = {"experiment", "output", "save_requests", "chrome_trace", "jobs", "show_list"}


def start(flags: dict[str, Any], given: Collection[str]) -> None:
    """Do what the flags ask. ``given`` are those that were on the command line."""
    if flags["show_list"]:
        _print_list()
        return
    path: Path | None = flags["experiment"]
    if path is not None:
        clash = sorted(set(given) - _OUTPUT_FLAGS - {"compare", "scale"})
        if clash:
            raise ConfigError(f"--{clash[0].replace('_', '-')} belongs into {path}")
        experiment = read_experiment(path)
        if "compare" in given:
            experiment = replace(experiment, compare=_names(flags["compare"]))
        if "scale" in given:
            experiment = replace(experiment, sweep=_numbers(flags["scale"]))
    else:
        experiment = _from_flags(flags)
    run_experiment(
        experiment,
        flags["output"],
        save_requests=flags["save_requests"],
        chrome_trace=flags["chrome_trace"],
        num_jobs=flags["jobs"],
    )


def _from_flags(flags: dict[str, Any]) -> Experiment:
    setup = Setup(
        model=flags["model"],
        device=flags["device"],
        num_instances=flags["num_instances"],
        gpus_per_instance=flags["gpus_per_instance"],
        profile=flags["profile"],
        instance_mib=flags["instance_mib"],
        memory_utilization=flags["memory_utilization"],
        block_size=flags["block_size"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        max_num_seqs=flags["max_num_seqs"],
        kills=tuple(_kill(text) for text in flags["kills"]),
        host_gib=flags["host_gib"],
    )
    load = Load(
        trace=flags["trace"],
        lengths=flags["lengths"],
        format=flags["trace_format"],
        rate=flags["request_rate"],
        start_s=flags["trace_start"],
        end_s=flags["trace_end"],
        duration_s=flags["duration"],
        max_total_tokens=flags["max_total_tokens"],
        seed=flags["seed"],
    )
    return Experiment(setup, load, _names(flags["compare"]), _numbers(flags["scale"]))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--scale takes numbers with commas between, not {text!r}") from None


def _kill(text: str) -> tuple[float, int]:
    moment, _, instance = text.partition(":")
    try:
        return float(moment), int(instance)
    except ValueError:
        raise ConfigError(f"--kill takes SEC:INSTANCE, not {text!r}") from None


def _print_list() -> None:
    print("Models")
    for model in MODELS.values():
        print(
            f"  {model.name:30} {model.weights_bytes / 2**30:7.1f} GiB, "
            f"{model.default_num_gpus} GPUs per instance"
        )
    print("Devices")
    for device in DEVICES.values():
        print(
            f"  {device.name:30} {device.memory_bytes / 1e9:.0f} GB, "
            f"{device.peak_flops / 1e12:.0f} TFLOP/s, {device.memory_bytes_per_s / 1e12:.1f} TB/s"
        )
    print("Systems")
    for system in SYSTEMS.values():
        print(f"  {system.label:30} {system.description}")
