"""Rules of the tree that neither import-linter nor ruff can express."""

import ast
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSES = [ROOT / name for name in ("kunserve", "kunserve_lab", "kunserve_extras")]
FILES = sorted(path for house in HOUSES for path in house.rglob("*.py"))

MAX_FILE_LINES = 450
"""The habit is 400; going over usually means a missing concept."""
READS_ENVIRONMENT = {
    "kunserve_lab/compare/others.py",
    "kunserve_lab/bench/server_process.py",
    "kunserve/cli.py",
    "kunserve/cluster/processes/launch.py",
    "kunserve_extras/ray/session.py",
    "kunserve_extras/torch_body/hops/pipes.py",
    "kunserve_extras/vllm_body/__init__.py",
    "kunserve/engine/cpu/kernels/build.py",
    "kunserve/engine/cpu/kernels/levels.py",
    "kunserve/server/start/flags/environment.py",
    "kunserve/server/start/flags/option.py",
}
"""The command line, what is handed on to child processes, a user's compiler and level of kernels,
what NCCL reads, and what an experiment's commands name."""
IMPORTS_LATE = {
    "kunserve/__init__.py",
    "kunserve/cli.py",
    "kunserve/engine/cpu/kernels/build.py",
    "kunserve/model/source.py",
    "kunserve_lab/bench/bench_command.py",
    "kunserve_lab/bench/run.py",
    "kunserve_lab/compare/compare_command.py",
    "kunserve_lab/compare/simulate_command.py",
    "kunserve_lab/observer/command.py",
    "kunserve/server/start/command.py",
    "kunserve/server/start/launch.py",
    "kunserve/server/start/launch_parts.py",
}
"""--help stays fast; torch, matplotlib and OpenTelemetry are optional, and numpy for a build; an
instance of a folder needs no hub."""
MAX_LOOSE_FILES = 20
SMALL_EXTRAS = {
    "admin.py",
    "kv_events.py",
    "openapi.py",
    "pausing.py",
    "chrome_trace.py",
    "doctor.py",
    "flashinfer_ops.py",
    "scale_command.py",
    "tracing.py",
}
MAX_FUNCTION_LINES = 60
"""Most have fewer than 30."""
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def trees() -> dict[str, ast.Module]:
    """Read once, and only by the process that runs these tests: it takes seconds.

    Three times as many where garbage is looked for meanwhile, among nodes that all are kept.
    """
    gc.disable()
    try:
        return {name_of(path): ast.parse(path.read_text(), name_of(path)) for path in FILES}
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forgotten_at_the_end() -> Iterator[None]:
    """Else whoever collects garbage later in this process looks at millions of nodes."""
    yield
    trees.cache_clear()


def functions_in(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def imported_roots(tree: ast.AST) -> set[str]:
    """Top-level names of everything imported anywhere in the tree."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def test_the_tree_is_found() -> None:
    assert len(FILES) > 300


def test_file_length() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_function_length() -> None:
    lengths = {
        f"{name}:{function.name}": num_lines(function)
        for name, tree in trees().items()
        for function in functions_in(tree)
    }
    assert len(lengths) > 1000
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def test_no_vague_module_names() -> None:
    parts = {p: {*p.relative_to(ROOT).parent.parts, p.stem} for p in FILES}
    assert not [name_of(p) for p in FILES if VAGUE_NAMES & parts[p]]


def test_only_the_command_line_lives_at_the_root() -> None:
    found = {p.name for house in HOUSES for p in house.glob("*.py")}
    assert found <= {"__init__.py", "cli.py", "commands.py"} | SMALL_EXTRAS


def test_no_folder_is_a_heap() -> None:
    """At most 20 loose files beside ``__init__.py``: more are several rooms."""
    files = [*FILES, *(p for name in ("tests", "benchmarks") for p in (ROOT / name).rglob("*.py"))]
    loose = Counter(str(p.parent.relative_to(ROOT)) for p in files if p.name != "__init__.py")
    assert not {folder: number for folder, number in loose.items() if number > MAX_LOOSE_FILES}


def test_one_file_touches_vllm() -> None:
    """What another release may have changed is looked for there only."""
    files = [name for name, tree in trees().items() if "vllm" in imported_roots(tree)]
    assert files == ["kunserve_extras/vllm_body/release.py"]


def test_core_is_standard_library_only() -> None:
    roots = {n: imported_roots(t) for n, t in trees().items() if n.startswith("kunserve/core/")}
    assert roots
    allowed = sys.stdlib_module_names | {"kunserve"}
    assert not {name: found - allowed for name, found in roots.items() if found - allowed}


def test_every_module_says_what_it_is() -> None:
    assert not [name for name, tree in trees().items() if not ast.get_docstring(tree)]


def test_imports_are_at_the_top() -> None:
    inside = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        if name not in IMPORTS_LATE
        for function in functions_in(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not inside


def test_library_code_reads_no_environment() -> None:
    reads = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        if name not in READS_ENVIRONMENT
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not reads


def test_a_seam_has_types() -> None:
    """Who is behind it can do all of it, and what it gives is something."""
    rooms = (
        "kunserve/engine/",
        "kunserve/control/",
        "kunserve/policy/",
        "kunserve/transport/bulk/",
    )
    raised = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        if name.startswith(rooms)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node)
    ]
    assert not raised
    for seam in ("kunserve/engine/backend.py", "kunserve/engine/memory/memory.py"):
        assert "Any" not in ast.dump(trees()[seam])
