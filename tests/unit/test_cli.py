"""The command line where a package is missing: a server install has no packages for figures."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

import kunserve
from kunserve.cli import main
from kunserve.core.code import code_of

WITHOUT = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # `import name` then fails as if it were not installed
sys.argv = ["kunserve", *{args!r}]
from kunserve.cli import main
main()
"""
EXTRA_ONLY = ["aiohttp", "matplotlib", "opentelemetry", "rich", "scipy", "triton"]


def run_without(names: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(names=names, args=list(args))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        (["bench", "--dataset-name", "random", "--num-prompts", "1"], "aiohttp"),
        (["profile", "--help"], "rich"),
        (["demo"], "matplotlib"),
        (["simulate", "--compare", "recompute,drop"], "rich"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_that_needs_an_extra_says_which(args: list[str], missing: str) -> None:
    done = run_without([missing], *args)
    assert done.returncode == 1
    how = "pip install 'kunserve[bench]'"
    expected = f"Error: kunserve {args[0]} needs the package {missing}: {how}\n"
    assert done.stderr == expected and "Traceback" not in done.stdout


def test_a_server_needs_no_extra_and_imports_neither_extras_nor_laboratory() -> None:
    """Every module of the serving house, in a process of its own."""
    script = (
        "import importlib, pkgutil, sys\n"
        f"for name in {EXTRA_ONLY!r}: sys.modules[name] = None\n"
        "import kunserve\n"
        "for found in pkgutil.walk_packages(kunserve.__path__, 'kunserve.'):\n"
        "    if '.triton' not in found.name and not found.name.endswith(('_ops', '__main__')):\n"
        "        importlib.import_module(found.name)\n"
        "others = ('kunserve_extras.', 'kunserve_lab.')\n"
        "loaded = [name for name in sys.modules if name.startswith(others)]\n"
        "assert all(name.endswith('.commands') for name in loaded), loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sreve", "Did you mean 'serve'?"),
        ("simulat", "Did you mean 'simulate'?"),
        ("xyz", "'xyz'."),
    ],
)
def test_a_slip_in_a_command(word: str, said: str) -> None:
    result = CliRunner().invoke(main, [word, "--port", "1"])
    assert result.exit_code == 2 and result.output.rstrip().endswith(said)


def test_the_version_names_the_code() -> None:
    said = CliRunner().invoke(main, ["--version"]).output
    assert said == f"kunserve {kunserve.__version__} (code {code_of()})\n"
