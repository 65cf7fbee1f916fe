"""``make test-processors``: tests whose answers a processor may change, as on several of them.

    python -m tests.running.processors [TEST ...] [--only NAME ...]

torch and oneDNN are held to what older processors have, and the kernels to each level that this
one can run. Without TEST these run: all of the engine's, where products, sums and roundings are
compared with torch's, numpy's and transformers'; and those of whole models that compare tokens or
logits so. Tests of schedules, sockets and processes compare only what one processor has computed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from typing import NamedTuple

from kunserve.engine.cpu.kernels.levels import (
    LEVELS,
    VARIABLE,
    fitting_levels,
    processor_features,
)

TESTS = (
    "tests/unit/engine",
    "tests/extras/torch_body",
    "tests/e2e/tokens/test_greedy_identity.py",  # transformers, and plain attention
    "tests/e2e/tokens/test_model_families.py",  # transformers
    "tests/e2e/tokens/test_smollm2.py",  # transformers, and quantised weights
    "tests/e2e/tokens/test_kv_ring.py",  # plain attention
    "tests/e2e/tokens/test_device_identity.py",  # transformers, and torch's own products
    "tests/e2e/tokens/test_tensor_parallel.py",  # sums of several ranks
    "tests/e2e/tokens/test_expert_ranks.py",
)
TORCH = {
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    "AVX-512": (
        {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        "avx512f",
    ),
}
"""What torch and oneDNN are held to, and the feature without which that is nothing new."""


class Kind(NamedTuple):
    """One run of the tests."""

    name: str
    environment: dict[str, str]
    lacks: str = ""
    """What of it this processor has not."""


def kinds() -> list[Kind]:
    """All runs, those that are not possible here too."""
    has, fitting = processor_features(), fitting_levels()
    found = [
        Kind(f"torch: {name}", variables, "" if feature in has else feature)
        for name, (variables, feature) in TORCH.items()
    ]
    found.append(Kind("as it is", {}))
    for level in LEVELS:
        lacks = ", ".join(sorted(level.needs - has)) or level.machine
        lacks = "" if level in fitting else lacks
        found.append(Kind(f"kernels: {level.name}", {VARIABLE: level.name}, lacks))
    return found


def counted(output: str) -> str:
    """The last line that pytest writes, without its time."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1].partition(" in ")[0].strip("= ") if lines else "no result"


def run(kind: Kind, words: list[str]) -> tuple[bool, str]:
    """Whether all passed, and what to say of it."""
    environment = os.environ | kind.environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-20000:])
    return done.returncode == 0, f"{counted(done.stdout)} in {time.monotonic() - begin:.0f} s"


def main() -> None:
    """The exit code is 1 if a test fails anywhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", help="of these names")
    parser.add_argument("--forks", default="1", help="of pytest")
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    args = parser.parse_args()
    all_passed, table = True, []
    for kind in kinds():
        if args.only and not any(word in kind.name for word in args.only):
            continue
        if kind.lacks:
            table.append((kind.name, f"not here: it needs {kind.lacks}"))
            continue
        passed, text = run(kind, ["--forks", args.forks, *args.tests])
        all_passed = all_passed and passed
        table.append((kind.name, ("" if passed else "FAILED: ") + text))
        print(f"{kind.name:26}{table[-1][1]}", file=sys.stderr, flush=True)
    print("\n".join(f"{name:26}{text}" for name, text in table), flush=True)
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
