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

    Once compiled no compiler is needed. Raises ``ConfigError`` if there is none or it fails.
    """
    name = f"kernels-{_key(extra_flags)}.so"
    folders = _folders()
    for folder in folders:
        if not force and os.access(folder / name, os.R_OK):
            return folder / name
    compiler = _compiler()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(dir=folder)
        except OSError:  # no permission, or a read-only file system
            continue
        with scratch:
            return _compile(compiler, Path(scratch.name), folder / name, extra_flags)
    tried = ", ".join(map(str, folders))
    raise ConfigError(
        f"the kernels are not compiled for this processor, and no folder for them can be written: "
        f"tried {tried}. Run `python -m kunserve.engine.kernels.build` where one can"
    )


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


def _key(extra_flags: tuple[str, ...]) -> str:
    """Whatever decides whether a compiled library fits: sources, flags, processor features.

    Not the compiler, because a machine that only runs the library has none.
    """
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join((*FLAGS, *extra_flags)).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The processor's features, as far as the system tells: what ``-march=native`` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return sys.platform
    kept = ("flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _folders() -> tuple[Path, ...]:
    """Where a compiled library may lie, best first."""
    beside = Path(__file__).parent / "_build"
    try:
        return beside, Path.home() / ".cache" / "kunserve"
    except RuntimeError:  # a user without a home, as in some containers
        return (beside,)


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
