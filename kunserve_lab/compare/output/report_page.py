"""A report in one file: tables, figures and the conditions, to open in any browser."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from kunserve_lab.compare.experiment import Experiment, World
from kunserve_lab.compare.output.table import Row

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;"
    "border-bottom:1px solid #e4e4e4}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%}code{background:#f3f3f3;padding:0 .3em}.note{color:#666}"
)
"""Of every report."""

_WORLDS = {
    World.SIMULATED: "Simulated: real controller, schedulers and policies over modelled instances, "
    "links and time.",
    World.REAL: "Real: a server of its own for each run, measured by a client on this machine.",
}


def write_report(
    path: Path,
    experiment: Experiment,
    conditions: Sequence[tuple[str, str]],
    verdict: Sequence[str],
    tables: Sequence[tuple[str, Sequence[Row], Sequence[str]]],
    figures: Sequence[tuple[str, Path]],
) -> None:
    """Everything inline: no file beside it is needed. ``tables`` are name, rows and notes."""
    title = html.escape(experiment.title)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{STYLE}</style><h1>{title}</h1>",
        f"<p class=note>{_WORLDS[experiment.world]}</p>",
    ]
    if experiment.claim:
        parts.append(f"<p>The paper: {html.escape(experiment.claim)}</p>")
    parts += [f"<p>{html.escape(line)}</p>" for line in verdict]
    parts.append(html_table([("setting", "value"), *conditions]))
    for name, lines, notes in tables:
        parts.append(f"<h2>{html.escape(name)}</h2>{html_table(lines)}")
        parts += [f"<p class=note>{html.escape(note)}</p>" for note in notes]
    for name, figure in figures:
        data = base64.b64encode(figure.read_bytes()).decode()
        parts.append(
            f"<h2>{html.escape(name)}</h2>"
            f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
        )
    path.write_text("\n".join(parts))


def html_table(lines: Sequence[Row]) -> str:
    """The head first."""
    head, *body = lines
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in body
    )
    return f"<table><tr>{cells}</tr>{rows}</table>"
