"""The numbers that decide something, on one page: ``docs/constants.md``.

``python -m tests.documents.constants_page docs/constants.md`` renews the page.
"""

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

HOUSE = Path(__file__).parents[2] / "kunserve"
ROOMS = {
    "policy": "what is worth doing, and how much of it",
    "control": "when it is done, and how long is waited",
    "cluster": "who lives, and who hangs",
    "transport/children": "how processes end",
}
TECHNICAL = {
    "policy/batch/lookahead.py",
    "cluster/instance/long_steps.py",
    "cluster/instance/loop.py",
    "cluster/instance/post.py",
    "cluster/waking_clock.py",
    "control/cluster/reasons.py",
}
"""They fit, round, tell people, or look at a clock: a server decides the same by other numbers."""
IN_PASSING = "LOOK_GAP"
"""How often something is looked at costs time, and decides nothing."""
INTRO = """# Numbers that decide

Times (`_S`: seconds), shares and factors that the code fixes. What users may want to change is a
[setting](configuration.md). Whole numbers mostly bound work; they stand in the code only.
`python -m tests.documents.constants_page docs/constants.md` writes this page.
"""
LEAST_WORDS, MOST_WORDS = 5, 7
"""Of what is told of a number: fewer do not say yet what it is, and the code has the others."""


def constants_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Names at the top that a docstring follows, of numbers with a fraction; and these."""
    body = ast.parse(source).body
    for node, after in pairwise(body):
        match node, after:
            case ast.Assign([ast.Name(name)], value), ast.Expr(ast.Constant(str(text))):
                number = ast.unparse(value)
                if _has_fraction(value) and not name.startswith("_") and IN_PASSING not in name:
                    yield name, number, _gist(text)


def page() -> str:
    """A list for each room that decides."""
    parts = [INTRO]
    for room, what in ROOMS.items():
        rows = []
        for path in sorted((HOUSE / room).rglob("*.py")):
            if str(path.relative_to(HOUSE)) not in TECHNICAL:
                module = ".".join(path.relative_to(HOUSE / room).with_suffix("").parts)
                found = constants_of(path.read_text())
                rows += [(f"{module}.{name}", number, gist) for name, number, gist in found]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows]
        parts += [f"\n## `{room}`: {what}\n\n```text\n", *(f"{line}\n" for line in lines), "```\n"]
    return "".join(parts)


def _has_fraction(value: ast.expr) -> bool:
    """Of numbers and nothing else, one of them no whole one."""
    match value:
        case ast.Constant(number):
            return isinstance(number, float)
        case ast.Tuple(elements):
            return all(map(_has_fraction, elements))
        case ast.BinOp(ast.Constant(int()), ast.Div(), ast.Constant(int())):
            return True
    return False


def _gist(docstring: str) -> str:
    """The first sentence, without the reason."""
    sentence = " ".join(docstring.split()).split(". ")[0].rstrip(".")
    clauses = [sentence.partition(behind)[0] for behind in (": ", ", because ", ", so that ")]
    told = [one.split() for one in (*clauses, sentence)]
    words = min((one for one in told if len(one) >= LEAST_WORDS), key=len, default=told[-1])
    text = " ".join(words[:MOST_WORDS]) + ("..." if len(words) > MOST_WORDS else "")
    return text[0].lower() + text[1:]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
