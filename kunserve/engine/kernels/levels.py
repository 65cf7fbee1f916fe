"""Kinds of processors that a wheel brings compiled kernels for, and which of them this one is."""

import platform
from dataclasses import dataclass
from pathlib import Path

_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """Processors of one machine type that can all do the same."""

    name: str
    machine: str
    """As ``uname -m`` says it."""
    flags: tuple[str, ...]
    """For the compiler, beside those that every build has."""
    needs: frozenset[str]
    """Features, as ``/proc/cpuinfo`` spells them."""


LEVELS = (
    Level(
        "x86-64-v4-bf16",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _V4 | {"avx512_bf16", "avx512_vnni"},  # every processor with the first has the second
    ),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""Best first."""


def levels_of(machine: str) -> tuple[Level, ...]:
    """The levels that a wheel for this machine type holds; none for a type that we do not know."""
    return tuple(level for level in LEVELS if level.machine == machine)


def fitting_levels() -> tuple[Level, ...]:
    """The levels that this processor can run, best first."""
    features = processor_features()
    return tuple(level for level in levels_of(platform.machine()) if level.needs <= features)


def processor_features() -> frozenset[str]:
    """What the processor can do, as far as the kernel lets programs use it."""
    fields = (line.partition(":") for line in _cpuinfo())
    lists = (value for name, _, value in fields if name.strip() in ("flags", "Features"))
    return frozenset(next(lists, "").split())


def processor_text() -> str:
    """Whatever of the processor's description ``-march=native`` may look at."""
    kept = ("flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in _cpuinfo() if line.startswith(kept)}))


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
