"""What the report consists of: pages that are filled in, and pictures that are drawn."""

from functools import partial
from pathlib import Path

from benchmarks.paper.report.asked_values import asked_values
from benchmarks.paper.report.drawings import DRAWINGS, Drawing
from benchmarks.paper.report.measured_values import measured_values
from benchmarks.paper.report.older_runs import older_values
from benchmarks.paper.report.own_tables import tables
from benchmarks.paper.report.paper_says import paper_values
from benchmarks.paper.report.references import REFERENCES
from benchmarks.paper.report.simulated_values import simulated_values
from benchmarks.paper.report.template import Sources, Text, fill

TEMPLATES = Path(__file__).parent / "text"
PAGES = Path(__file__).parents[3] / "docs" / "report"
FIGURES = "figures"
"""The folder of pictures beside the pages."""
ORDER = ("index", "paper-figures")
"""The pages, as they follow each other in one document."""


def sources() -> Sources:
    """Everything that a page may name."""
    values: dict[str, Text] = {}
    for some in (
        simulated_values(),
        measured_values(),
        asked_values(),
        older_values(),
        paper_values(),
    ):
        assert not values.keys() & some.keys(), values.keys() & some.keys()
        values |= some
    figures = {name: partial(_figure, name, drawing) for name, drawing in DRAWINGS.items()}
    return Sources(values, tables(), figures, REFERENCES)


def _figure(name: str, drawing: Drawing) -> str:
    """As Markdown, with what is said below it."""
    return f"![{drawing.caption}]({FIGURES}/{name}.png)\n\n*{drawing.caption}*"


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    known = sources()
    return {name: fill((TEMPLATES / f"{name}.md").read_text(), known) for name in ORDER}


def write_pages() -> dict[str, str]:
    """Pages and pictures of docs/report/."""
    (PAGES / FIGURES).mkdir(parents=True, exist_ok=True)
    texts = pages()
    for name, text in texts.items():
        (PAGES / f"{name}.md").write_text(text)
    for name, drawing in DRAWINGS.items():
        drawing.save(PAGES / FIGURES / f"{name}.png")
    return texts
