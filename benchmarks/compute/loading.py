"""How long instances of one host load their weights: one copy for all, or a copy each.

    python -m benchmarks.compute.loading [--model smollm2-135m] [--instances 2] [--rounds 5]
    python -m benchmarks.compute.loading --model FOLDER --copies 8

``kunserve serve --weights shared`` and ``--weights private`` start in turn. A start's figure is
that of its slowest instance, as its own log says it ("loaded in"): who shares counts its waits for
the others. With ``--copies`` FOLDER's model (``model.safetensors``) has each layer that often, so
that reading and packing take seconds.
"""

import argparse
import contextlib
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.report import Report
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve_lab.bench.server_process import running_server

MODES = ("shared", "private")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
LOADED = re.compile(r"memory ([0-9.]+) MiB.*weights ([0-9.]+) MiB.*loaded in ([0-9.]+) s")


@contextlib.contextmanager
def larger(model: str, copies: int) -> Generator[str, None, None]:
    """The model, or a folder with one that has each of its layers ``copies`` times."""
    if copies == 1:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="kunserve-loading-") as name:
        folder = Path(name)
        for file in Path(model).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        config = json.loads((folder / "config.json").read_text())
        layers = config["num_hidden_layers"]
        config["num_hidden_layers"] = layers * copies
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, tensor in load_file(Path(model) / "model.safetensors").items():
            match = LAYER.fullmatch(name)
            if match is None:
                tensors[name] = tensor
                continue
            for copy in range(copies):
                at = int(match[1]) + copy * layers
                tensors[f"model.layers.{at}.{match[2]}"] = tensor.clone()
        save_file(tensors, folder / "model.safetensors")
        yield str(folder)


def load_s_of(model: str, mode: str, options: argparse.Namespace) -> tuple[float, float]:
    """Of one start: its slowest instance's seconds, and the MiB of weights that each maps."""
    flags = [model, "--num-instances", str(options.instances), "--weights", mode]
    flags += ["--overload-policy", "recompute", "--instance-memory", options.instance_memory]
    with running_server(flags) as server:
        log = server.log_path.read_text(errors="replace")
    found = LOADED.findall(log)
    assert len(found) == options.instances, log
    return max(float(load_s) for *_, load_s in found), float(found[0][1])


def main() -> None:
    """Start in turn, then say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="with --copies, a folder")
    parser.add_argument("--copies", type=int, default=1, help="of each layer")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--instance-memory", default="3GiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seen: dict[str, list[float]] = {mode: [] for mode in MODES}
    with larger(options.model, options.copies) as model:
        for number in range(options.rounds):
            for mode in MODES if number % 2 else reversed(MODES):
                load_s, weights_mib = load_s_of(model, mode, options)
                seen[mode].append(load_s)
                line = f"round {number}: {mode} {load_s:.2f} s, weights {weights_mib:.0f} MiB"
                print(line, file=sys.stderr, flush=True)
    settings = {"processor": processor_name(), "copies": options.copies, "rounds": options.rounds}
    with Report("loading", model=Path(options.model).name, **settings) as report:
        for mode in MODES:
            report.add("loaded", statistics.median(seen[mode]), "s", weights=mode)
            report.add("least", min(seen[mode]), "s", weights=mode)
            report.add("most", max(seen[mode]), "s", weights=mode)
        ratios = [a / b for a, b in zip(seen["shared"], seen["private"], strict=True)]
        report.add("shared / private", statistics.median(ratios), "")


if __name__ == "__main__":
    main()
