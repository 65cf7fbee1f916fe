"""What only a GPU can show, in one go that survives crashes and goes on where it stopped.

    python -m benchmarks.gpu_day [--phases P0,P1,...] [--out DIR] [--device cuda|fake]

Each phase is a process of its own with a time limit. After each the folder has its figures as JSON
and a report so far, so a crash or a limit loses one phase at most; what is done is not done again.
``--device fake`` rehearses all of it on the CPU with small sizes: its figures mean nothing.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_phases import story
from benchmarks.gpu_phases.story import DONE
from kunserve.engine.torch.cuda.driver import LIBRARY

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing to find out."""

    module: str
    """Under ``benchmarks.gpu_phases``; its first line says what."""
    limit_s: float


PHASES = {
    "P0": Phase("probe", 60.0),
    "P1": Phase("mapping", 120.0),
    "P2": Phase("kernels", 120.0),
    "P3": Phase("identity", 180.0),
    "P3b": Phase("ranks", 180.0),
    "P4": Phase("replay", 150.0),
    "P5": Phase("speed", 240.0),
    "P5b": Phase("yardstick", 240.0),
    "P6": Phase("load", 480.0),
    "P8": Phase("costs", 240.0),
    "P7": Phase("spike", 510.0),
    "P9": Phase("peer", 150.0),
}
"""In the order in which they run: P7 serves and simulates with what P8 has measured."""


def run_here(name: str, device: str, out: Path, limit_s: float = math.inf) -> None:
    """The phase itself, in its own process: figures go to standard output."""
    from benchmarks.gpu_phases.machine import Machine
    from benchmarks.report import Report

    module = importlib.import_module(f"benchmarks.gpu_phases.{PHASES[name].module}")
    with Report(f"gpu_day {name}", device=device) as report:
        module.run(Machine.named(device, out, limit_s), report)


def run_apart(name: str, device: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run a phase as a process, and keep what it found."""
    figures, log = out / f"{name}.jsonl", out / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--one", name, "--device", device]
    command += ["--out", str(out), "--limit", str(limit_s)]
    began = time.monotonic()
    with figures.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = DONE if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit_s:.0f} s"
        finally:
            # Instances of a phase that was stopped, or that crashed, hold memory of the device.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = {
        "phase": name,
        "device": device,
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "figures": _figures(figures),
        "log": log.read_text(errors="replace").splitlines()[-30:] if outcome != DONE else [],
    }
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _figures(path: Path) -> list[dict[str, Any]]:
    """Lines that are figures; a process that was killed may leave half a line."""
    figures = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            figure = json.loads(line)
            if isinstance(figure, dict) and "settings" in figure:
                figures.append(figure)
    return figures


def known(name: str, out: Path) -> dict[str, Any] | None:
    """What an earlier call has found."""
    path = out / f"{name}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def has_driver() -> bool:
    """Without taking a context, which would hold memory of the device all day."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def write_report(out: Path) -> Path:
    """What all phases so far have found, as Markdown with charts."""
    return story.write_report(out, {name: phase.module for name, phase in PHASES.items()})


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PHASES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PHASES)}")
    return names


def main() -> None:
    """Run what is asked for and not done, one phase after the other."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["phases:"]
            + [f"  {name}  {p.module}, at most {p.limit_s:.0f} s" for name, p in PHASES.items()]
        ),
    )
    parser.add_argument("--phases", type=_names, default=list(PHASES), metavar="P0,P1,...")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_day"))
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--within", type=float, metavar="S", help="start nothing after that")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--one", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()  # phases run in the project's folder
    if options.one:
        run_here(options.one, options.device, options.out, options.limit)
        return
    if options.device == "cuda" and not has_driver():
        sys.exit(f"no driver ({LIBRARY}) here; --device fake rehearses on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + (float("inf") if options.within is None else options.within)
    all_done = True
    for name in options.phases:
        before = known(name, options.out)
        is_done = before is not None and (before["outcome"], before["device"]) == (
            DONE,
            options.device,
        )
        left_s = ends - time.monotonic()
        if is_done and not options.again:
            print(f"{name} is done already", flush=True)
        elif left_s <= 0:
            print(f"{name}: no time left", flush=True)
            all_done = False
        else:
            limit_s = min(PHASES[name].limit_s, left_s)
            found = run_apart(name, options.device, options.out, limit_s)
            print(f"{name}: {found['outcome']} in {found['seconds']} s", flush=True)
            all_done = all_done and found["outcome"] == DONE
            write_report(options.out)
    print(write_report(options.out))
    sys.exit(not all_done)


if __name__ == "__main__":
    main()
