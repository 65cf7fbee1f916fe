"""The report as a PDF: headings, paragraphs, lists, tables and pictures of its Markdown.

fpdf2 sets the type, in the fonts that matplotlib brings: no TeX, no browser, no system library.
"""

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from fpdf import FPDF
from fpdf.enums import TableBordersLayout, XPos, YPos
from fpdf.fonts import FontFace

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = {
    "": "DejaVuSerif",
    "B": "DejaVuSerif-Bold",
    "I": "DejaVuSerif-Italic",
    "BI": "DejaVuSerif-BoldItalic",
}
FAMILY = "serif"
TEXT_PT, TABLE_PT, HEADING_PT = 8.5, 6.2, {1: 15.0, 2: 11.5, 3: 9.5}
LINE = 1.35
"""Of the size of the type."""
MM = 25.4 / 72
"""Of a point."""
MARGIN_MM = 18.0
GAP_MM = 1.6
WRITTEN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""Told as the file's date, so that equal reports are equal files."""
NARROWEST = 6
"""Letters that every column of a table has room for."""
_LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")
_IMAGE = re.compile(r"!\[[^]]*\]\(([^)]*)\)")
_ITEM = re.compile(r"(\*|\d+\.) ")


def write_pdf(text: str, folder: Path, path: Path) -> None:
    """``text`` is Markdown whose pictures lie in ``folder``."""
    page = _Paper()
    for block in blocks(text):
        page.add(block, folder)
    page.output(str(path))


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, headings, items, pictures and tables, each whole."""
    for part in re.split(r"\n{2,}", text.strip()):
        lines = part.splitlines()
        if _ITEM.match(lines[0]):
            yield from re.split(r"\n(?=(?:\*|\d+\.) )", part)
        else:
            yield part if lines[0].startswith("|") else " ".join(lines)


def marked(text: str) -> str:
    """Markdown as fpdf2 has it: emphasis is ``__``, dashes are no underline, code is plain."""
    text = _LINK.sub(lambda found: _linked(found[1], found[2]), text)
    parts = re.split(r"(`[^`]*`)", text)
    for at, part in enumerate(parts):
        if part.startswith("`"):
            parts[at] = re.sub(r"--|__|~~|\*\*", r"\\\g<0>", part.strip("`"))
        else:
            parts[at] = re.sub(r"(?<!\*)\*(?!\*)([^*]+)\*(?!\*)", r"__\1__", part)
    return "".join(parts)


def _linked(text: str, where: str) -> str:
    """Only links to the world lead anywhere from a file of its own."""
    return f"[{text}]({where})" if where.startswith("http") else text


class _Paper(FPDF):  # type: ignore[misc]  # fpdf2 is not read
    """Pages of A4 with a number at the foot."""

    MARKDOWN_LINK_COLOR = "#2b6cb0"

    def __init__(self) -> None:
        super().__init__(format="A4")
        for style, name in FACES.items():
            self.add_font(FAMILY, style, FONTS / f"{name}.ttf")
        self.set_creation_date(WRITTEN)
        self.set_margin(MARGIN_MM)
        self.set_auto_page_break(auto=True, margin=MARGIN_MM)
        self.add_page()

    def footer(self) -> None:
        """The page's number."""
        self.set_y(-12)
        self.set_font(FAMILY, "", 7)
        self.cell(0, 5, str(self.page_no()), align="C")

    def add(self, block: str, folder: Path) -> None:
        """One block of Markdown."""
        picture = _IMAGE.fullmatch(block)
        if picture is not None:
            self.image(str(folder / picture[1]), w=self.epw)
            self.ln(GAP_MM)
        elif block.startswith("|"):
            self._table(block)
        elif block.startswith("#"):
            self._heading(block)
        elif _ITEM.match(block):
            sign, rest = block.split(" ", 1)
            self._paragraph(rest, "\u2022" if sign == "*" else sign)
        else:
            self._paragraph(block)

    def _heading(self, block: str) -> None:
        signs, title = block.split(" ", 1)
        size = HEADING_PT[len(signs)]
        self.ln(size * MM * 0.6)
        if self.will_page_break(4 * size * MM):
            self.add_page()
        self.set_font(FAMILY, "B", size)
        self.multi_cell(0, size * MM * LINE, title, align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        self.ln(GAP_MM)

    def _paragraph(self, text: str, sign: str = "") -> None:
        self.set_font(FAMILY, "", TEXT_PT)
        indent = 6.0 if sign else 0.0
        if sign:
            self.cell(indent, TEXT_PT * MM * LINE, sign)
        self.multi_cell(
            self.epw - indent,
            TEXT_PT * MM * LINE,
            marked(text),
            align="L",
            markdown=True,
            new_x=XPos.LMARGIN,
            new_y=YPos.NEXT,
        )
        self.ln(GAP_MM / 2 if sign else GAP_MM)

    def _table(self, block: str) -> None:
        head, _, *body = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        rows = [head, *body]
        self.set_font(FAMILY, "", TABLE_PT)
        with self.table(
            rows=[[marked(cell) for cell in row] for row in rows],
            col_widths=widths(rows),
            borders_layout=TableBordersLayout.HORIZONTAL_LINES,
            headings_style=FontFace(emphasis="BOLD"),
            line_height=TABLE_PT * MM * LINE,
            padding=0.5,
            markdown=True,
            text_align="LEFT",
        ):
            pass
        self.ln(GAP_MM)


def widths(rows: list[list[str]]) -> tuple[int, ...]:
    """Shares of the page's width: what a column holds on average, and its longest word."""
    found = []
    for column in zip(*rows, strict=True):
        words = [len(word) for cell in column for word in _LINK.sub(r"\1", cell).split()]
        mean = sum(len(_LINK.sub(r"\1", cell)) for cell in column) / len(column)
        found.append(max(NARROWEST, *words, round(mean**0.75)))
    return tuple(found)
