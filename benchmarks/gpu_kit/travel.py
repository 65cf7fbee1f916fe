"""What a borrowed GPU machine without a network has to be given, and the command for each call.

    python -m benchmarks.gpu_kit.travel --into CHECKOUT [--state DIR]

Puts the project, the packages that such a machine lacks and what earlier calls have packed into the
folder ``.gpu`` of a checkout, which travels with it, and prints a command for each call of the day.
"""

import argparse
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import kunserve
from benchmarks.gpu_kit.calls import CALLS
from benchmarks.gpu_kit.evidence import SUFFIX

ROOT = Path(__file__).parents[2]
FOLDER = ".gpu"
MOST_BYTES = 60 << 20
"""Of everything that travels, the checkout included."""
MOST_CHARACTERS = 2000
"""Of a command."""
LACKING = (
    "annotated-types", "gguf", "httptools", "llguidance", "msgspec", "pydantic", "pydantic-core",
    "pyzmq", "starlette", "typing-inspection", "uvicorn",
)  # fmt: skip
"""What a machine with torch, Triton and transformers still lacks."""
FLASHINFER = ("flashinfer-python", "apache-tvm-ffi")
_PLATFORMS = tuple(
    f"manylinux{name}_x86_64"
    for name in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
)
_STAY = ("benchmarks/results/", "docs/", "deploy/", "tests/golden/", "tests/e2e/", "tests/unit/")
"""Of the project, what no phase reads."""
_COMMAND = (
    "set -o pipefail; export PYTHONUNBUFFERED=1 D=/tmp/gpu_day; G=$PWD/{folder}; "
    "E=${{OUT:-$D/evidence}}; mkdir -p $D/project $E && tar xzf $G/project.tar.gz -C $D/project && "
    "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade "
    "--target $D/site $G/wheels/*.whl && export PYTHONPATH=$D/project:$D/site && cd $D/project && "
    "python3 -m benchmarks.gpu_day --call {call} --state $G/state --evidence $E --out $D/out{more} "
    "2>&1 | tee $E/call-{call}.log"
)


def command(call: str, more: str = "") -> str:
    """For a shell in the checkout. What comes back lies in ``$OUT``, where that is set."""
    text = _COMMAND.format(folder=FOLDER, call=call, more=more)
    assert len(text) <= MOST_CHARACTERS, len(text)
    return text


def pack_project(target: Path) -> None:
    """The files that phases need, as they are now."""
    with tarfile.open(target, "w:gz", compresslevel=6) as tar:
        for name in _tracked(ROOT):
            if not name.startswith(_STAY) and (ROOT / name).is_file():
                tar.add(ROOT / name, name)
        for name, text in _metadata().items():
            info, data = tarfile.TarInfo(name), text.encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _metadata() -> dict[str, str]:
    """What an installation would leave: without it nothing of the extras is found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = f"kunserve-{kunserve.__version__}.dist-info"
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: kunserve\n"
        f"Version: {kunserve.__version__}\n",
        f"{folder}/entry_points.txt": "\n".join(lines),
    }


def bring_wheels(folder: Path, python: str, names: Sequence[str]) -> None:
    """Of the versions that are installed here; those of others are taken away."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in names if _is_here(name)]
    wanted += [name for name in names if not _is_here(name)]
    for path in folder.glob("*.whl"):
        path.unlink()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    command += [word for name in _PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, *wanted], check=True)


def take_state(source: Path | None, folder: Path) -> None:
    """What earlier calls have packed, beside what was taken before."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [] if source is None else sorted(source.glob(f"*{SUFFIX}")):
        shutil.copyfile(path, folder / path.name)


def _is_here(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tracked(folder: Path) -> list[str]:
    """What git has or would take of a checkout."""
    command = ["git", "-C", str(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name]


def _ignore(checkout: Path) -> None:
    """The folder is nobody's business but this machine's."""
    command = ["git", "-C", str(checkout), "rev-parse", "--git-path", "info/exclude"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    path, line = checkout / listed, f"/{FOLDER}/"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if line not in text.splitlines():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + f"\n{line}\n", encoding="utf-8")


def bytes_of(checkout: Path) -> dict[str, int]:
    """What travels: the checkout's own files, and ours."""
    own = sum(
        path.stat().st_size for name in _tracked(checkout) if (path := checkout / name).is_file()
    )
    folder = checkout / FOLDER
    parts = {
        path.name: sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())
        for path in sorted(folder.iterdir())
    }
    return {"checkout": own, **parts}


def main() -> None:
    """Build the folder, weigh it, and say the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT, help="a checkout that travels")
    parser.add_argument("--state", type=Path, help="a folder of what earlier calls have packed")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--flashinfer", action="store_true", help="bring it, too")
    parser.add_argument("--rehearse", action="store_true", help="commands for a machine without")
    options = parser.parse_args()
    checkout = options.into.absolute()
    folder = checkout / FOLDER
    folder.mkdir(exist_ok=True)
    _ignore(checkout)
    pack_project(folder / "project.tar.gz")
    names = LACKING + (FLASHINFER if options.flashinfer else ())
    bring_wheels(folder / "wheels", options.python, names)
    take_state(options.state, folder / "state")
    sizes = bytes_of(checkout)
    for name, size in sizes.items():
        print(f"{name:20} {size / (1 << 20):7.2f} MiB")
    total = sum(sizes.values())
    print(f"{'all':20} {total / (1 << 20):7.2f} of {MOST_BYTES >> 20} MiB")
    if total > MOST_BYTES:
        sys.exit("that is too much: name another checkout, or leave --flashinfer out")
    more = " --device fake" if options.rehearse else ""
    print(f"carry {FOLDER} (in {os.fspath(checkout)}), limit each command to 600 s")
    for name, call in CALLS.items():
        print(f"\n# {name}: {call.shows}\n# {call.arithmetic}\n{command(name, more)}")


if __name__ == "__main__":
    main()
