"""Lists the benchmarks, each with its first line: ``python -m benchmarks``."""

import ast
import functools
from pathlib import Path

FOLDER = Path(__file__).parent


@functools.cache
def benchmarks() -> dict[str, str]:
    """Name, with its folder, and first line of every module that can be run."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in names and path.stem != "__main__":
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
            found[name] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def main() -> None:
    """Print the list."""
    for name, line in benchmarks().items():
        print(f"python -m benchmarks.{name:26} {line}")


if __name__ == "__main__":
    main()
