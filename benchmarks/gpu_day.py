"""What only a GPU can show, in pieces that survive crashes and go on where they stopped.

    python -m benchmarks.gpu_day [--call A | --phases S,P3,...] [--out DIR] [--device cuda|fake]

Each phase is a process of its own with a time limit, and has parts, of which each is guarded by
itself. After every part all that is known is packed into ``--evidence``, whole at any moment; what
is done is not done again, also from files that another machine has packed (``--state``).
``--device fake`` rehearses all of it on the CPU with small sizes: its figures mean nothing.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit import children, evidence, parts, story
from benchmarks.gpu_kit.calls import CALL_S, CALLS, SETUP_S, Leg
from benchmarks.gpu_kit.story import DONE
from kunserve_extras.torch_body.cuda.driver import LIBRARY
from kunserve_lab.bench.server_process import SERVER_LOGS

ROOT = Path(__file__).parent.parent
_PACK_EVERY_S = 15.0
"""Also while a part is under way, for its log."""
_SANITIZE_S = 90.0
_REHEARSAL_TIMES = 5.0
"""Limits are for a borrowed GPU. A rehearsal may share two cores: only what hangs is stopped."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing to find out."""

    module: str
    """Under ``benchmarks.gpu_phases``; its first line says what."""
    limit_s: float


PHASES = {
    "S": Phase("smoke", 60.0),
    "P3": Phase("identity", 180.0),
    "P1": Phase("mapping", 120.0),
    "P4": Phase("replay", 150.0),
    "P6": Phase("load", 480.0),
    "P0": Phase("probe", 120.0),
    "P2": Phase("kernels", 120.0),
    "P5": Phase("speed", 240.0),
    "P5b": Phase("yardstick", 240.0),
    "P8": Phase("costs", 240.0),
    "P7": Phase("spike", 510.0),
    "P12": Phase("served", 150.0),
    "P3b": Phase("ranks", 180.0),
    "P9": Phase("peer", 150.0),
    "P10": Phase("vllm_identity", 180.0),
    "P11": Phase("vllm_burst", 330.0),
}
"""In the order in which they run: the most valuable first. P7 uses the profile of P8."""


@dataclass(frozen=True, slots=True)
class Day:
    """Where phases run, and where what they find goes."""

    device: str
    out: Path
    evidence: Path | None = None
    """Where each phase is packed; None: nowhere."""
    environment: dict[str, str] = field(default_factory=dict)

    def pack(self, name: str, since_s: float) -> None:
        """All that is known of a phase."""
        if self.evidence is not None:
            with contextlib.suppress(OSError):  # a full disk takes only this, not the day
                evidence.pack(name, self.out, self.evidence, since_s)


def run_here(
    name: str, device: str, out: Path, limit_s: float = math.inf, only: Sequence[str] = ()
) -> None:
    """The phase itself, in its own process: figures and parts go to standard output."""
    from benchmarks.gpu_phases.machine import Machine
    from benchmarks.report import Report

    known = parts.Known.of(out / f"{name}.jsonl", only)
    module = importlib.import_module(f"benchmarks.gpu_phases.{PHASES[name].module}")
    with Report(f"gpu_day {name}", device=device) as report:
        module.run(Machine.named(device, out, limit_s, known), report)


def _run_one(name: str, device: str, out: Path, limit_s: float, only: Sequence[str]) -> None:
    """``run_here`` for a parent: unwinds on SIGTERM, and shows its stacks on SIGUSR1."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run_here(name, device, out, limit_s, only)
    except parts.PartsFailed as error:
        sys.exit(str(error))
    except parts.DeviceIsLost as error:
        print(error, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(parts.LOST_CODE)  # what would be tidied up is on a device that is gone


def run_apart(
    name: str, day: Day, limit_s: float, only: Sequence[str] = (), anew: bool = False
) -> dict[str, Any]:
    """Run a phase as a process, and keep what it found. ``anew``: not only what is not done."""
    lines, log = day.out / f"{name}.jsonl", day.out / f"{name}.log"
    before = known(name, day.out)
    is_new = anew or before is None or before["device"] != day.device
    began, since_s = time.monotonic(), time.time()
    watch = _Watch(name, day, lines, since_s)
    evidence.snapshot(day.out / f"{name}.device.txt", "before")
    with lines.open("wb" if is_new else "ab") as stdout, log.open("ab") as stderr:
        if stdout.tell():
            stdout.write(b"\n")  # half a line of one that was killed ends here
            stdout.flush()
        code = children.run(
            _command(name, day, limit_s, only),
            folder=ROOT,
            environment=day.environment | _environment(name, day.out),
            stdout=stdout,
            stderr=stderr,
            limit_s=limit_s,
            look=watch.look,
        )
    said = parts.read(lines)
    if code == parts.LOST_CODE and said.lost is not None:
        _sanitize(name, day, said.lost, limit_s - (time.monotonic() - began))
    found = {
        "phase": name,
        "device": day.device,
        "outcome": _outcome(code, said, limit_s),
        "only": list(only),
        "seconds": round(time.monotonic() - began, 1),
        "parts": said.parts,
        "figures": said.figures,
        "log": log.read_text(errors="replace").splitlines()[-30:] if code != 0 else [],
    }
    (day.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    evidence.snapshot(day.out / f"{name}.device.txt", "after")
    day.pack(name, since_s)
    return found


def _command(name: str, day: Day, limit_s: float, only: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--one", name, "--device", day.device]
    command += ["--out", str(day.out), "--limit", str(limit_s)]
    return command + [word for pattern in only for word in ("--only", pattern)]


def _environment(name: str, out: Path) -> dict[str, str]:
    """Compiled kernels and logs of servers lie where they are packed."""
    servers = out / f"{name}.servers"
    servers.mkdir(exist_ok=True)
    return {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(out / "triton"),
        SERVER_LOGS: str(servers),
    }


@dataclass(slots=True)
class _Watch:
    """Packs a phase when a part has ended, and from time to time."""

    name: str
    day: Day
    lines: Path
    since_s: float
    _size: int = 0
    _num_ended: int = 0
    _packed_s: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Called all the time."""
        is_time = time.monotonic() - self._packed_s > _PACK_EVERY_S
        size = self.lines.stat().st_size
        if not is_time and size == self._size:
            return
        self._size, num_ended = size, parts.read(self.lines).num_ended
        if is_time or num_ended != self._num_ended:
            self._num_ended, self._packed_s = num_ended, time.monotonic()
            self.day.pack(self.name, self.since_s)


def _sanitize(name: str, day: Day, part: str, left_s: float) -> None:
    """The part that has lost the device again, under what tells which access was wrong."""
    sanitizer = evidence.find_sanitizer()
    if sanitizer is None:
        return
    path = day.out / f"{name}.sanitizer.log"
    limit_s = max(20.0, min(_SANITIZE_S, left_s))
    with path.open("wb") as log:
        children.run(
            [sanitizer, "--tool", "memcheck", *_command(name, day, limit_s, (part,))],
            folder=ROOT,
            environment=day.environment | _environment(name, day.out),
            stdout=log,
            stderr=log,
            limit_s=limit_s,
        )


def _outcome(code: int | None, said: parts.Lines, limit_s: float) -> str:
    """In words, for people; ``DONE`` where all that was asked for is."""
    if code == 0:
        return DONE
    bad = [name for name, one in said.parts.items() if one["is"] != parts.DONE]
    of = f" ({len(bad)} of {len(said.parts)} parts: {', '.join(bad)})" if bad else ""
    if code is None:
        return f"stopped after {limit_s:.0f} s{of}"
    if code == parts.LOST_CODE:
        return f"lost the device{of}"
    return f"failed with exit code {code}{of}"


def known(name: str, out: Path) -> dict[str, Any] | None:
    """What an earlier call has found. One that was cut off has left its lines only."""
    path = out / f"{name}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    said = parts.read(out / f"{name}.jsonl")
    devices = {figure["settings"].get("device") for figure in said.figures}
    if not devices:
        return None
    found = {"phase": name, "device": devices.pop(), "outcome": "cut off", "only": [], "seconds": 0}
    return found | {"parts": said.parts, "figures": said.figures, "log": []}


def has_driver() -> bool:
    """Without taking a context, which would hold memory of the device all day."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def write_report(out: Path) -> Path:
    """What all phases so far have found, as Markdown with charts."""
    modules = {name: phase.module for name, phase in PHASES.items()}
    return story.write_report(out, modules, _found(out))


def _found(out: Path) -> story.Found:
    return {name: one for name in PHASES if (one := known(name, out)) is not None}


def _is_done(leg: Leg, day: Day) -> bool:
    before = known(leg.phase, day.out)
    if before is None or (before["outcome"], before["device"]) != (DONE, day.device):
        return False
    asked = before.get("only", [])
    return not asked or asked == list(leg.only)


def run_legs(legs: Sequence[Leg], day: Day, within_s: float, anew: bool) -> bool:
    """One phase after the other; whether all are done."""
    ends_s, all_done = time.monotonic() + within_s, True
    for leg in legs:
        left_s = ends_s - time.monotonic()
        if not anew and _is_done(leg, day):
            print(f"{leg.phase} is done already", flush=True)
        elif left_s <= 0:
            print(f"{leg.phase}: no time left", flush=True)
            all_done = False
        else:
            found = run_apart(leg.phase, day, min(leg.limit_s, left_s), leg.only, anew)
            print(f"{leg.phase}: {found['outcome']} in {found['seconds']} s", flush=True)
            all_done = all_done and found["outcome"] == DONE
            write_report(day.out)
    return all_done


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PHASES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PHASES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["phases:"]
            + [f"  {name}  {p.module}, at most {p.limit_s:.0f} s" for name, p in PHASES.items()]
            + ["calls:"]
            + [f"  {name}  {call.shows}\n     {call.arithmetic}" for name, call in CALLS.items()]
        ),
    )
    parser.add_argument("--call", choices=CALLS, help="one of six, each under ten minutes")
    parser.add_argument("--phases", type=_names, default=list(PHASES), metavar="S,P3,...")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_day"))
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="a packed file of each phase")
    parser.add_argument("--state", type=Path, metavar="DIR", help="go on with files packed before")
    parser.add_argument("--report", action="store_true", help="only write it, of what there is")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--within", type=float, metavar="S", help="start nothing after that")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--one", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=math.inf, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run what is asked for and not done, one phase after the other."""
    options = _parser().parse_args()
    options.out = options.out.absolute()  # phases run in the project's folder
    if options.one:
        _run_one(options.one, options.device, options.out, options.limit, options.only)
        return
    if options.device == "cuda" and not options.report and not has_driver():
        sys.exit(f"no driver ({LIBRARY}) here; --device fake rehearses on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.state is not None:
        taken = evidence.unpack(options.state, options.out)
        print(f"goes on with {', '.join(taken) or 'nothing'}", flush=True)
    day = Day(options.device, options.out, options.evidence and options.evidence.absolute())
    all_done = True
    if not options.report:
        times = _REHEARSAL_TIMES if options.device == "fake" else 1.0
        legs = [Leg(name, times * PHASES[name].limit_s) for name in options.phases]
        within_s = math.inf if options.within is None else options.within
        if options.call:
            call = CALLS[options.call]
            print(f"call {options.call}: {call.arithmetic}", flush=True)
            legs, within_s = list(call.legs), min(within_s, CALL_S - SETUP_S)
        all_done = run_legs(legs, day, within_s, options.again)
    print(write_report(options.out))
    # What is printed last comes back first, whatever becomes of the files.
    print("\n".join(story.in_short(_found(options.out), list(PHASES))), flush=True)
    sys.exit(not all_done)


if __name__ == "__main__":
    main()
