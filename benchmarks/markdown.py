"""Tables of documents."""

from collections.abc import Sequence

Row = Sequence[str]


def markdown(rows: Sequence[Row]) -> str:
    """A table of a document; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
