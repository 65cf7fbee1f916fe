"""What ``pytest --changed`` runs: all that could tell, and little else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.changed import ROOT, Graph

PROJECT = """
[project.scripts]
kunserve = "kunserve.cli:main"
[project.entry-points."kunserve.routes"]
page = "kunserve_extras.page:routes"
[project.entry-points."kunserve.library"]
offline = "kunserve_extras.offline"
"""
TREE = {
    "kunserve/__init__.py": "def __getattr__(name): return find_extra('library', 'offline', name)",
    "kunserve/cli.py": "def main():\n    from kunserve.server import app",
    "kunserve/core.py": "",
    "kunserve/policy/__init__.py": "",
    "kunserve/policy/drop.py": "'''As kunserve.server says.'''\nfrom kunserve.core import Layer",
    "kunserve/policy/table.csv": "1,2",
    "kunserve/server/__init__.py": "",
    "kunserve/server/app.py": "import kunserve.policy.drop\nevery_extra('routes')",
    "kunserve/main.py": "from kunserve.engine import body",
    "kunserve/engine/__init__.py": "",
    "kunserve/engine/body.py": "import kunserve\nkunserve.__version__",
    "kunserve_extras/page.py": "",
    "kunserve_extras/offline.py": "",
    "tests/conftest.py": "",
    "tests/words.py": "",
    "tests/test_architecture.py": "",
    "tests/unit/test_drop.py": "from kunserve.policy.drop import plan",
    "tests/unit/test_words.py": "if True:\n    from tests import words",
    "tests/e2e/conftest.py": "from kunserve.core import Layer",
    "tests/e2e/test_process.py": "run('-m', 'kunserve.main')",
    "tests/e2e/test_script.py": "BIN / 'kunserve'",
    "tests/e2e/test_program.py": "Path(__file__).with_name('program.py')",
    "tests/e2e/program.py": "from kunserve import LLM",
    "tests/docs/test_docs.py": "ROOT / 'docs' / 'gpu.md'",
    "docs/gpu.md": "",
}


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    for name, text in TREE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return Graph(tmp_path, ["kunserve/gone.py"])


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("kunserve/policy/drop.py", "drop script"),
        ("kunserve/policy/__init__.py", "drop script"),
        ("kunserve/policy/table.csv", "drop script"),
        ("kunserve/core.py", "drop process program script"),
        ("kunserve/server/app.py", "script"),
        ("kunserve_extras/page.py", "script"),
        ("kunserve_extras/offline.py", "program"),
        ("kunserve/engine/body.py", "process"),
        ("kunserve/__init__.py", "drop process program script"),
        ("tests/words.py", "words"),
        ("tests/e2e/conftest.py", "process program script"),
        ("tests/e2e/test_script.py", "script"),
        ("docs/gpu.md", "docs"),
        ("docs/other.md", "docs"),
        ("kunserve/gone.py", ""),
        ("pyproject.toml", "docs drop process program script words"),
    ],
)
def test_who_can_tell(graph: Graph, changed: str, tests: str) -> None:
    found = {Path(file).stem.removeprefix("test_") for file in graph.tests_of([changed])}
    assert found == {"architecture", *tests.split()}


@pytest.fixture(scope="module")
def tree() -> Graph:
    return Graph(ROOT)


LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(file for one in sys.modules.values() if (file := getattr(one, "__file__", None))))
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("kunserve_lab.world.fake_main", "tests/e2e/processes/test_local_cluster.py"),
        ("benchmarks.faults.faulty_instance", "tests/e2e/processes/test_failures.py"),
        ("tests.running.front_process", "tests/e2e/processes/test_front_loss.py"),
        ("kunserve.server.start.launch", "tests/e2e/processes/test_server_process.py"),
    ],
)
def test_a_test_depends_on_all_that_its_processes_load(
    tree: Graph, program: str, test: str
) -> None:
    command = [sys.executable, "-c", LOADED, program]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = {str(Path(f).relative_to(ROOT)) for f in said.split() if f.startswith(f"{ROOT}/kun")}
    assert len(ours) > 40
    assert not {file for file in ours if test not in tree.dependents([file])}


def test_a_drop_plan_is_nothing_to_a_parser_or_a_kernel(tree: Graph) -> None:
    found = tree.tests_of(["kunserve/policy/drop/plan.py"])
    assert "tests/unit/policy/drop/test_drop_plan.py" in found
    assert "tests/property/cluster/test_transitions.py" in found
    assert "tests/e2e/tokens/test_tokens_through_a_drop.py" in found
    assert "tests/property/wire/test_parsers.py" not in found
    assert "tests/unit/engine/cpu/test_kernels.py" not in found
