"""A report in one file: tables, figures and the conditions, to open in any browser."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;"
    "border-bottom:1px solid #e4e4e4}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%}code{background:#f3f3f3;padding:0 .3em}.note{color:#666}"
)


def write_report(
    path: Path,
    title: str,
    claim: str,
    conditions: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, Sequence[tuple[str, ...]]]],
    figures: Sequence[tuple[str, Path]],
) -> None:
    """Everything inline: no file beside it is needed."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        "<p class=note>Simulated: real controller, schedulers and policies over modelled "
        "instances, links and time.</p>",
    ]
    if claim:
        parts.append(f"<p>The paper: {html.escape(claim)}</p>")
    parts.append(_table([("setting", "value"), *conditions]))
    for name, lines in tables:
        parts.append(f"<h2>{html.escape(name)}</h2>{_table(lines)}")
    for name, figure in figures:
        data = base64.b64encode(figure.read_bytes()).decode()
        parts.append(
            f"<h2>{html.escape(name)}</h2>"
            f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
        )
    path.write_text("\n".join(parts))


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    head, *body = lines
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in body
    )
    return f"<table><tr>{cells}</tr>{rows}</table>"
