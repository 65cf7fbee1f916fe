"""The compiled C kernels: those that a wheel brings, or compiled on the machine that runs them.

``python -m kunserve.engine.cpu.kernels.build`` compiles for this very processor, at install time. A
wheel brings a library for each level of ``levels.py``. Whoever has neither compiles at first use.
Where the processor has AMX, the level with tiles comes first, once it is tried (``tiles.py``).
``KUNSERVE_KERNELS`` in the environment names one of these levels, which is taken then.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels.levels import (
    Level,
    asked_level,
    fitting_levels,
    levels_of,
    native_flags,
    processor_features,
    processor_text,
)

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / "shipped"
"""Where a wheel has its libraries."""
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wno-psabi",
    "-fno-math-errno",  # else sqrtf is called, and libm would be needed
)
NATIVE = native_flags()
CLANGS = ("clang", *(f"clang-{version}" for version in range(25, 13, -1)))
"""Debian has several side by side, and ``clang`` only where one of them was chosen."""


def find_or_build() -> Path:
    """The best library for this processor: compiled for it, else shipped, else compiled now.

    Or that of the level that ``KUNSERVE_KERNELS`` names. Raises ``ConfigError`` if it must be
    compiled and cannot be, or if there is no such level for this processor, or Linux refuses it.
    """
    asked = asked_level()
    if asked is not None:
        return of_level(asked)
    for level in fitting_levels():
        try:
            if level.has_tiles:
                return of_level(level)
        except ConfigError as error:
            logger.warning("the next best kernels are taken: %s", error)
    folders = _folders()
    found = _readable(folders, _native_name(())) or _shipped()
    if found is not None:
        return found
    logger.warning("no compiled kernels fit this processor: compiling them once, for some seconds")
    return build()


def build(force: bool = False, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library for this very processor, compiled if it is missing or ``force`` is set.

    Once compiled no compiler is needed. Raises ``ConfigError`` if there is none or it fails.
    """
    name = _native_name(extra_flags)
    found = _readable(_folders(), name)
    if found is not None and not force:
        return found
    compiler = _compiler(prefers_clang=not _has_wide_vectors(processor_features()))
    return _compile_somewhere([compiler, *FLAGS, *NATIVE, *extra_flags], name)


def build_level(level: Level) -> Path:
    """The library for ``level``, compiled on this machine if it is missing.

    Raises ``ConfigError`` without a compiler, or if it fails.
    """
    name = _name_of(level)
    found = _readable(_folders(), name)
    if found is not None:
        return found
    return _compile_somewhere(_command_for(level), name)


def why_not(path: Path) -> str | None:
    """See ``tiles``, which wants numpy: whoever makes a wheel comes here without it."""
    from kunserve.engine.cpu.kernels import tiles

    return tiles.why_not(path)


def of_level(level: Level) -> Path:
    """The library for a level that the processor can run, shipped or compiled.

    Raises ``ConfigError`` without one, and if Linux refuses its tiles or they compute wrongly.
    """
    path = _readable((SHIPPED,), _name_of(level)) or build_level(level)
    if level.has_tiles and (reason := why_not(path)):
        raise ConfigError(f"kernels {level.name} cannot be used: {reason}")
    return path


def _compile_somewhere(command: list[str], name: str) -> Path:
    """Compile into the first folder that can be written."""
    folders = _folders()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(dir=folder)
        except OSError:  # no permission, or a read-only file system
            continue
        with scratch:
            return _compile(command, Path(scratch.name), folder / name)
    tried = ", ".join(map(str, folders))
    raise ConfigError(
        f"the kernels are not compiled for this processor, and no folder for them can be written: "
        f"tried {tried}. Run `python -m kunserve.engine.cpu.kernels.build` where one can"
    )


def build_shipped(target: Path, machine: str | None = None) -> list[Path]:
    """Compile for every level of this machine type, or of ``machine``, into the folder ``target``.

    Called when a wheel is made. Raises ``ConfigError`` without a compiler.
    """
    levels = levels_of(machine or platform.machine())
    if not levels:
        return []
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda level: _build_level(level, target), levels))


def _build_level(level: Level, target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        return _compile(_command_for(level), Path(scratch), target / _name_of(level))


def _command_for(level: Level) -> list[str]:
    compiler = _compiler(prefers_clang=not _has_wide_vectors(level.needs))
    return [compiler, *FLAGS, *level.flags]


def _compile(command: list[str], scratch: Path, target: Path) -> Path:
    """Compile into ``scratch``, then move into place at once: others may be loading it."""
    output = scratch / "kernels.so"
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    result = subprocess.run(
        [*command, "-o", str(output), *sources], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise ConfigError(f"{command[0]} could not compile the kernels:\n{result.stderr[:4000]}")
    os.replace(output, target)
    return target


def _compiler(prefers_clang: bool) -> str:
    """The compiler to take; clang's code for vectors wider than the processor's own is better."""
    gcc = ("gcc", "cc")
    for name in CLANGS + gcc if prefers_clang else gcc + CLANGS:
        found = shutil.which(name)
        if found is None:
            continue
        if prefers_clang and name in gcc and platform.machine() != "x86_64":
            logger.warning("for this processor clang's kernels are several times faster than gcc's")
        return found
    raise ConfigError("a C compiler is needed: install gcc (Debian: apt-get install gcc libc6-dev)")


def _has_wide_vectors(features: frozenset[str]) -> bool:
    """Whether the processor has vectors of 64 bytes, which the kernels are written in."""
    return "avx512f" in features


def _shipped() -> Path | None:
    """The best library without tiles that the wheel brings for this processor, if any."""
    levels = (level for level in fitting_levels() if not level.has_tiles)
    found = (_readable((SHIPPED,), _name_of(level)) for level in levels)
    return next((path for path in found if path is not None), None)


def _readable(folders: tuple[Path, ...], name: str) -> Path | None:
    return next((folder / name for folder in folders if os.access(folder / name, os.R_OK)), None)


def _native_name(extra_flags: tuple[str, ...]) -> str:
    """A name that changes with whatever decides whether a compiled library fits.

    Not with the compiler, because a machine that only runs the library has none.
    """
    return f"kernels-{_digest(*NATIVE, *extra_flags, processor_text() or sys.platform)}.so"


def _name_of(level: Level) -> str:
    """A name that a library of other sources does not have."""
    return f"kernels-{level.name}-{_digest(*level.flags)}.so"


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join((*FLAGS, *parts)).encode())
    return digest.hexdigest()[:16]


def _folders() -> tuple[Path, ...]:
    """Where a compiled library may lie, best first."""
    beside = Path(__file__).parent / "_build"
    try:
        return beside, Path.home() / ".cache" / "kunserve"
    except RuntimeError:  # a user without a home, as in some containers
        return (beside,)


if __name__ == "__main__":
    sys.stdout.write(f"{build(force='--force' in sys.argv)}\n")
    for level in fitting_levels():
        if level.has_tiles:
            sys.stdout.write(f"{build_level(level)}\n")
