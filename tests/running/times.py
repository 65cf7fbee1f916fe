"""Where the tests' time goes: ``pytest --junitxml FILE``, then this writes the page of it.

python -m tests.running.times FILE "COMMAND, COMMIT" > docs/testing-times.md
"""

import os
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from kunserve.engine.cpu.kernels.levels import processor_name

NUM_ROWS = 15


def seconds_by_file(junit: Path) -> dict[str, tuple[float, int]]:
    """Of each module: the seconds of its tests with their fixtures, and how many there are."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        names = [name for name in case.get("classname", "").split(".") if not name[:1].isupper()]
        seconds, num_tests = found["/".join(names)]
        found["/".join(names)] = seconds + float(case.get("time", 0)), num_tests + 1
    return dict(found)


def table(head: str, rows: dict[str, tuple[float, int]], num_rows: int) -> list[str]:
    first = sorted(rows.items(), key=lambda row: -row[1][0])[:num_rows]
    lines = [f"| `{name}` | {seconds:.0f} | {num} |" for name, (seconds, num) in first]
    return [f"| {head} | seconds | tests |", "|---|---|---|", *lines, ""]


def main(junit: str, made_by: str) -> None:
    files = {name: row for name, row in seconds_by_file(Path(junit)).items() if name}
    total_s, num_tests = (sum(column) for column in zip(*files.values(), strict=True))
    print("# Where the tests' time goes\n")
    processors = f"{os.cpu_count()} x {processor_name()}"
    print(f"Written by `python -m tests.running.times`. {made_by}, on {processors}. Seconds of the")
    print(f"processes that run tests, waits included: {total_s:.0f} in all, {num_tests} tests.\n")
    print("\n".join(table("file", files, NUM_ROWS)).rstrip())


if __name__ == "__main__":
    main(*sys.argv[1:])
