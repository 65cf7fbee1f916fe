"""Do the tests find what is wrong? Faults are planted one by one in a copy of the tree.

python -m tests.running.planted_faults [PART_OF_A_FILE_NAME ...]

For each fault of ``planted_faults.toml`` the tests run that ``pytest --changed`` would choose: the
nearest by name and folder first, what takes long last, until one fails.
"""

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.running.changed import ROOT, Graph

FAULTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
LATER = ("tests/lab", "tests/extras", "tests/documents", "tests/test_", "tests/e2e")
"""What takes long. What needs more than this environment has is in none of these folders."""
BUILT = "kunserve/engine/cpu/kernels/_build"


def copy_tree(folder: Path) -> None:
    """All files of the working tree that git knows or would add, and the built kernels."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    known = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout
    command = ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read", BUILT]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, input=known).stdout
    subprocess.run(["tar", "--extract"], cwd=folder, check=True, input=packed)


def plant(folder: Path, fault: dict[str, str]) -> str:
    """The file as it was."""
    file = folder / fault["file"]
    text = file.read_text()
    assert text.count(fault["old"]) == 1, f"not there once: {fault['old']}"
    file.write_text(text.replace(fault["old"], fault["new"]))
    return text


def failing(folder: Path, tests: Sequence[str], broken: Iterable[str] = ()) -> str | None:
    """The first test that fails, of those that are not broken anyway."""
    left_out = [word for test in broken for word in ("--deselect", test)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *left_out, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1, 5), done.stdout[-2000:] + done.stderr[-2000:]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else None


def find(folder: Path, fault: dict[str, str], tests: list[str], broken: set[str]) -> str | None:
    """The first test that fails with the fault, and not without it."""
    while True:
        text = plant(folder, fault)
        found = failing(folder, tests, broken)
        (folder / fault["file"]).write_text(text)
        if found is None or failing(folder, [found]) is None:
            return found
        broken.add(found)


def in_turn(file: str, tests: set[str]) -> list[list[str]]:
    """Those that are named like the file come first: they find most faults in seconds."""
    beside = f"tests/unit/{file.split('/')[1]}/"
    turns = [(beside,), ("tests/unit",), ("tests/property", "tests/parity", "tests/golden"), LATER]
    found = [sorted(test for test in tests if Path(file).stem in Path(test).name)]
    tests = tests.difference(found[0])
    for folders in turns:
        found.append(sorted(test for test in tests if test.startswith(folders)))
        tests = tests.difference(found[-1])
    return [some for some in found if some]


def main(*parts: str) -> None:
    graph = Graph(ROOT)
    faults = [one for one in FAULTS if not parts or any(part in one["file"] for part in parts)]
    num_found, broken = 0, set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        for fault in faults:
            begin = time.monotonic()
            turns = in_turn(fault["file"], graph.tests_of([fault["file"]]))
            some = (find(folder, fault, tests, broken) for tests in turns)
            found = next(filter(None, some), None)
            num_found += found is not None
            said = f"{fault['what']}: {found or 'NOT FOUND'} ({time.monotonic() - begin:.0f} s)"
            print(said, flush=True)
    print(f"{num_found} of {len(faults)} found; broken without a fault: {len(broken)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
