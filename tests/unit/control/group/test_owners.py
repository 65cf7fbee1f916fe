"""The facts of a group are written by their owners, and by nobody else."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from kunserve import control
from kunserve.control.group.ledger import BlockCounts, Ledger
from kunserve.control.group.sequence import Sequence

CONTROL = Path(control.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(Sequence)}
OF_CACHE = {"borrow", "lend", "hold_lent", "use_cached", "leave_cached", "keep", "evict"}
"""Changes of the prefix cache's blocks."""
OF_REQUESTS = {
    "grow": {"relief", "swap"},
    "shrink": {"swap"},
    "release": {"relief", "migration"},
    "hold": {"relief"},
    "give_back": {"relief"},
    "reserve": {"migration"},
    "resize": {"scheduler"},
    "clear": {"scheduler"},
}
"""Changes of requests' blocks, and whose they are: who has KV (with those in host memory), who is
on the way here; the group's memory as a whole is its scheduler's."""


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """(module, node) of all of the brain's code."""
    for file in sorted(CONTROL.rglob("*.py")):
        yield from ((file.stem, node) for node in ast.walk(ast.parse(file.read_text())))


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [one for t in node.targets for one in getattr(t, "elts", [t])]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def is_a_sequence(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"seq", "sequence", "grower", "victim"}


def test_a_sequence_is_written_by_itself() -> None:
    found = [
        (module, target.attr)
        for module, node in nodes()
        for target in targets(node)
        if isinstance(target, ast.Attribute)
        and target.attr in FIELDS
        and (is_a_sequence(target.value) or ast.unparse(target.value).endswith(".seq"))
    ]
    assert not found


def test_the_ledger_is_written_by_who_has_the_blocks() -> None:
    found: dict[str, set[str]] = {}
    for module, node in nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value).rpartition(".")[2] in {"ledger", "_ledger"}:
            found.setdefault(node.func.attr, set()).add(module)
    assert set(found) >= OF_CACHE | OF_REQUESTS.keys(), "a change that nobody makes"
    assert all(found[name] == {"prefix_cache"} for name in OF_CACHE), found
    assert {name: found[name] for name in OF_REQUESTS} == OF_REQUESTS
    changes = {name for name in vars(Ledger) if not name.startswith("_")}
    assert changes == OF_CACHE | OF_REQUESTS.keys()


def test_who_only_reads_the_ledger_is_given_what_cannot_be_changed() -> None:
    owners = set.union({"prefix_cache"}, *OF_REQUESTS.values())
    fields = vars(BlockCounts(1)).keys()
    named: dict[str, set[str]] = {}
    for module, node in nodes():
        if isinstance(node, ast.ImportFrom) and node.module == "kunserve.control.group.ledger":
            for alias in node.names:
                named.setdefault(alias.name, set()).add(module)
        for target in targets(node):
            if isinstance(target, ast.Attribute) and target.attr in fields:
                assert not ast.unparse(target.value).endswith("ledger"), (module, target.attr)
    assert named["Ledger"] == owners
    assert not named["BlockCounts"] & owners
