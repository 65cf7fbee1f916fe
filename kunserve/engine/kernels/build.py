"""Compiles the C kernels on the machine that runs them, once per source and processor.

``python -m kunserve.engine.kernels.build`` does it at install time; first use does it otherwise.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kunserve.core.errors import ConfigError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-Wall")


def build(force: bool = False, extra_flags: tuple[str, ...] = ()) -> Path:
    """The compiled library's path, compiling it if it is missing or ``force`` is set.

    Raises ``ConfigError`` if there is no C compiler or it fails.
    """
    compiler = _compiler()
    key = _key(compiler, extra_flags)
    for folder in _folders():
        if not force and (folder / f"kernels-{key}.so").exists():
            return folder / f"kernels-{key}.so"
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                return _compile(compiler, Path(scratch), folder / f"kernels-{key}.so", extra_flags)
        except PermissionError:
            continue
    raise ConfigError(f"no writable folder for the compiled kernels: tried {_folders()}")


def _compile(compiler: str, scratch: Path, target: Path, extra_flags: tuple[str, ...]) -> Path:
    """Compile into ``scratch``, then move into place at once: others may be loading it."""
    output = scratch / "kernels.so"
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    command = [compiler, *FLAGS, *extra_flags, "-o", str(output), *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ConfigError(f"{compiler} could not compile the kernels:\n{result.stderr[:4000]}")
    os.replace(output, target)
    return target


def _compiler() -> str:
    for name in ("gcc", "cc", "clang"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise ConfigError("a C compiler is needed: install gcc (Debian: apt-get install gcc libc6-dev)")


def _key(compiler: str, extra_flags: tuple[str, ...]) -> str:
    """Whatever changes the machine code: sources, flags, compiler version, processor features."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join((*FLAGS, *extra_flags)).encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    digest.update(version.stdout + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The processor's model and features, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return sys.platform
    kept = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _folders() -> tuple[Path, Path]:
    """Where a compiled library may lie, best first."""
    return Path(__file__).parent / "_build", Path.home() / ".cache" / "kunserve"


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
