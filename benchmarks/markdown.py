"""Tables of documents."""

from collections.abc import Sequence

Row = Sequence[str]


def markdown(rows: Sequence[Row]) -> str:
    """A table of a document; the first row is its head."""
    head, *body = rows
    rule = "|---" * len(head) + "|"
    shown = [f"| {' | '.join(cells)} |" for cells in (head, *body)]
    return "\n".join([shown[0], rule, *shown[1:]])
