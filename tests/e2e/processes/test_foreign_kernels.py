"""The kernels compiled for processors that are not this one."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kunserve.engine.cpu.kernels.build import CLANGS, FLAGS, SOURCES
from kunserve.engine.cpu.kernels.levels import LEVELS, Level, fitting_levels

CHECK = Path(__file__).with_name("kernel_check.c")
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}


def compiler_for(level: Level) -> list[str] | None:
    """As wheels are built: clang where vectors are narrow, which gcc takes minutes to compile."""
    gcc = shutil.which(COMPILERS[level.machine])
    clang = next((name for name in CLANGS if shutil.which(name)), None)
    if gcc is not None and clang is not None and "avx512f" not in level.needs:
        return [clang, f"--target={level.machine}-linux-gnu"]  # with the libc that gcc brought
    return None if gcc is None else [gcc]


def runner_for(level: Level) -> list[str] | None:
    """What runs a program of the level; None if nothing here does."""
    if level.machine == platform.machine():
        return [] if level in fitting_levels() else None
    names = (f"qemu-{level.machine}", f"qemu-{level.machine}-static")
    emulator = next((found for name in names if (found := shutil.which(name))), None)
    return None if emulator is None else [emulator]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_level_is_compiled_and_counts_right(level: Level, tmp_path: Path) -> None:
    """Debian has what it needs as gcc-aarch64-linux-gnu, clang and qemu-user."""
    compiler = compiler_for(level)
    if compiler is None:
        pytest.skip(f"no {COMPILERS[level.machine]}")
    program = tmp_path / "check"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-O3")]
    sources = [str(CHECK), *map(str, SOURCES.glob("*.c"))]
    subprocess.run(
        [
            *(*compiler, "-O1", "-static", *flags, *level.flags, f"-I{SOURCES}"),
            *("-o", program, *sources, "-lm"),
        ],
        check=True,
    )
    runner = runner_for(level)
    if runner is None:
        pytest.skip(f"nothing here runs programs for {level.name}")
    done = subprocess.run([*runner, program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout
