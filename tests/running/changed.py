"""``pytest --changed``: only tests that can tell what has changed since ``main`` or a revision.

A file depends on what it imports, on what its strings name (modules that processes run, entry
points, scripts, data), and on each ``conftest.py`` above it. A test runs if it depends, over any
number of files, on one that differs from where this branch left ``main``, committed or not.
"""

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kunserve", "kunserve_lab", "kunserve_extras", "tests", "benchmarks")
NAMED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+\.?")
"""With two names at least: a module, something in one, or the head of several (``a.b.``)."""
FOR_ALL = {"pyproject.toml", "tests/running/changed.py", "tests/conftest.py"}
"""Whatever else they are, they are every test's settings."""
ALWAYS = re.compile(r"tests/(test_\w+|documents/test_\w+|e2e/processes/test_container)\.py")
"""They read the whole tree, or install it."""
TESTS = re.compile(r"tests/(\w+/)*test_\w+\.py")
EVERYWHERE = {"__init__.py", "conftest.py"}
"""Names of many files: not a program's."""
ASKERS = {"find_extra", "every_extra"}
"""Of ``kunserve.core.extras``: the first argument is a group of entry points."""


TELLING = {
    *(ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.BinOp, ast.Constant),
    *(ast.Expr, ast.FunctionDef),
}
"""Nodes that are looked at: most are not."""
SELECTED = pytest.StashKey[set[str]]()
"""Test files to collect."""


class Graph:
    """Which file of a tree depends on which. Files are paths relative to its root."""

    def __init__(self, root: Path, gone: Iterable[str] = ()) -> None:
        """``gone`` are files that have been deleted, because somebody may still name them."""
        self._root = root
        paths = [path for name in PACKAGES for path in (root / name).rglob("*.py")]
        self.files = {str(path.relative_to(root)) for path in paths}
        self._modules = {module_of(file): file for file in self.files.union(gone)}
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        self._scripts = {name: at.split(":")[0] for name, at in project["scripts"].items()}
        self._entries = {
            group: " ".join(names.values()) for group, names in project["entry-points"].items()
        }
        self._users: dict[str, set[str]] = defaultdict(set)
        self._sayers: dict[str, set[str]] = defaultdict(set)
        """Files by strings, or the heads of paths, in them."""
        self._called: dict[str, list[str]] = defaultdict(list)
        """Files by their last names."""
        for file in self.files:
            self._called[file.rpartition("/")[2]].append(file)
        for file in self.files:
            for user, name in self._names(file):
                for needed in self._resolved(name):
                    self._users[needed].add(user)

    def dependents(self, changed: Iterable[str]) -> set[str]:
        """These files, as far as they are Python, and all that depend on any of them."""
        changed = set(changed)
        todo = [one for file in changed for one in self._owners(file)]
        if changed & FOR_ALL:
            todo = [*self.files]
        found = set(todo)
        while todo:
            new = self._users[todo.pop()] - found
            found |= new
            todo += new
        return found

    def tests_of(self, changed: Iterable[str]) -> set[str]:
        """The test files to run."""
        found = self.dependents(changed).union(filter(ALWAYS.fullmatch, self.files))
        return set(filter(TESTS.fullmatch, found & self.files))

    def _owners(self, file: str) -> set[str]:
        """Who holds the file: itself, or the modules beside data; and whoever names it."""
        path = Path(file)
        heads = {path.name, path.parts[0]}.difference(PACKAGES)
        owners = {one for head in heads for one in self._sayers[head]}
        if path.suffix == ".py":
            return owners | {file}
        for folder in path.parents[:-1]:
            if beside := {one for one in self.files if Path(one).parent == folder}:
                return owners | beside
        return owners

    def _names(self, file: str) -> Iterator[tuple[str, str]]:
        """Who needs which module; a package's functions are a user of their own."""
        tree = ast.parse((self._root / file).read_text())
        for folder in Path(file).parents:
            yield file, module_of(str(folder / "__init__.py"))
            if str(folder / "conftest.py") in self.files:
                yield file, module_of(str(folder / "conftest.py"))
        is_test = file.startswith(("tests/", "benchmarks/"))
        nodes = [node for node in ast.walk(tree) if type(node) in TELLING]
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        late = functions_in(nodes) if file.endswith("__init__.py") else set()
        for node in nodes:
            user = f"{file}:late" if id(node) in late else file
            match node:
                case ast.Import(names):
                    yield from ((user, alias.name) for alias in names)
                case ast.ImportFrom(str(module), names):
                    found = [f"{module}.{alias.name}" for alias in names]
                    yield from ((user, name) for name in found)
                    if any(name not in self._modules and "__" not in name for name in found):
                        yield user, f"{module}:late"
                case ast.Attribute(ast.Name(name), attribute) if name in PACKAGES:
                    if "__" not in attribute:
                        yield user, f"{name}:late"
                case ast.Call(ast.Name(name), [ast.Constant(seam), *_]) if name in ASKERS:
                    yield user, f"kunserve.{seam}"
                case ast.BinOp(_, ast.Div(), ast.Constant(str(name))) if is_test:
                    yield user, self._scripts.get(name, "")
                case ast.Constant(str(text)) if id(node) not in texts:
                    self._sayers[text].add(user)
                    self._sayers[text.split("/")[0]].add(user)
                    self._sayers[text.split("/")[-1]].add(user)
                    yield from ((user, name) for name in NAMED.findall(text))
                    if text.endswith(".py") and text not in EVERYWHERE:
                        yield from ((user, module_of(f)) for f in self._ending(text))

    def _ending(self, path: str) -> Iterator[str]:
        alike = self._called[path.rpartition("/")[2]]
        return (file for file in alike if f"/{file}".endswith(f"/{path}"))

    def _resolved(self, name: str) -> Iterator[str]:
        """Files of a module, of what is named in one, or of all that begins so (``a.b.``)."""
        for target in NAMED.findall(self._entries.get(name, "")):
            yield from self._resolved(target)
        if name.endswith("."):
            yield from (file for module, file in self._modules.items() if module.startswith(name))
        module, *late = name.split(":")
        if module not in self._modules and not late:
            module = module.rpartition(".")[0]
        if module in self._modules:
            yield ":".join((self._modules[module], *late))


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def functions_in(nodes: list[ast.AST]) -> set[int]:
    """The nodes that run only when somebody calls."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {id(node) for function in functions for node in ast.walk(function)}


def changed_since(revision: str) -> list[str]:
    """Files that differ from where this branch left the revision, or that git does not know."""

    def git(*words: str) -> list[str]:
        said = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return said.stdout.split("\n")[:-1]

    (base,) = git("merge-base", revision, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", "--no-renames", base), *new]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", nargs="?", const="main", metavar="REVISION", help=__doc__)


def pytest_configure(config: pytest.Config) -> None:
    revision = config.getoption("changed")
    if not revision:
        return
    changed = changed_since(revision)
    gone = [file for file in changed if not (ROOT / file).exists()]
    config.stash[SELECTED] = Graph(ROOT, gone).tests_of(changed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if SELECTED in config.stash and collection_path.match("test_*.py"):
        return str(collection_path.relative_to(ROOT)) not in config.stash[SELECTED] or None
    return None
