"""Kinds of processors that a wheel brings compiled kernels for, and which of them this one is."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from kunserve.core.errors import ConfigError

VARIABLE = "KUNSERVE_KERNELS"
"""In the environment: the name of the level to take, instead of the best one."""

_FEATURES = ("flags", "Features", "vendor_id")
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
    has_tiles: bool = False
    """Of AMX, which Linux gives on demand, so the kernels are tried before they are taken."""


_V4_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_V4_BF16_FLAGS = (*_V4_VNNI_FLAGS, "-mavx512bf16")
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}  # every processor with the first has the second

LEVELS = (
    Level(
        "x86-64-v4-amx",
        "x86_64",
        (*_V4_VNNI_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DKUN_AMX"),
        _V4_BF16 | {"amx_bf16", "amx_int8", "amx_tile"},
        has_tiles=True,
    ),
    Level("x86-64-v4-bf16", "x86_64", _V4_BF16_FLAGS, _V4_BF16),
    Level("x86-64-v4-vnni", "x86_64", _V4_VNNI_FLAGS, _V4 | {"avx512_vnni"}),
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
    features, is_slow = processor_features(), has_slow_bfloat16()
    found = [level for level in levels_of(platform.machine()) if level.needs <= features]
    if is_slow:  # the next best one has all the rest that it has
        found.sort(key=lambda level: "avx512_bf16" in level.needs and not level.has_tiles)
    return tuple(found)


def has_slow_bfloat16() -> bool:
    """Whether vectors multiply bfloat16 at half the speed of the same numbers as floats.

    So measured on an Emerald Rapids, where 1 of its instructions begins in the time of 3.5 of
    those for floats. Taken to hold for all of Intel's with tiles, in which it does bfloat16, even
    where a cloud hides these: all of them have float16 as well. AMD's are twice as fast with it.
    """
    return {"GenuineIntel", "avx512_fp16"} <= processor_features()


def native_flags() -> tuple[str, ...]:
    """For a compiler, to make code for this very processor."""
    return ("-march=native", *(("-DKUN_SLOW_BF16",) if has_slow_bfloat16() else ()))


def asked_level() -> Level | None:
    """The level that ``KUNSERVE_KERNELS`` names, if it is set.

    Raises ``ConfigError`` if it names none, or one that this processor cannot run.
    """
    name = os.environ.get(VARIABLE)
    return level_named(name) if name else None


def level_named(name: str) -> Level:
    """A level by its name. Raises ``ConfigError`` if none has it, or it cannot run here."""
    fitting = {level.name: level for level in fitting_levels()}
    if name in fitting:
        return fitting[name]
    here = ", ".join(fitting) or "none"
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        raise ConfigError(f"no kernels are called {name!r}; for this processor there are {here}")
    lacks = ", ".join(sorted(level.needs - processor_features())) or level.machine
    raise ConfigError(f"kernels {name} need {lacks}, which this processor lacks; it can run {here}")


def processor_features() -> frozenset[str]:
    """What the processor can do, as far as the kernel lets programs use it, and who made it."""
    found: dict[str, list[str]] = {}
    for name, _, value in (line.partition(":") for line in _cpuinfo()):
        found.setdefault(name.strip(), value.split())
    return frozenset(word for name in _FEATURES for word in found.get(name, ()))


def processor_name() -> str:
    """The processor's own name where Linux tells it, else its kind."""
    names = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def processor_text() -> str:
    """Whatever of the processor's description ``-march=native`` may look at."""
    kept = ("flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in _cpuinfo() if line.startswith(kept)}))


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
