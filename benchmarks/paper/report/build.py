"""The report: its pages, pictures, HTML and PDF, from kept results alone.

    python -m benchmarks.paper.report.build [-o FOLDER]      (or: make report)

Writes docs/report/ (Markdown and pictures, which are committed), and report.html and report.pdf
into the folder (build/report), and says where they lie. Half a minute.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.paper.report.content import PAGES, write_pages
from benchmarks.paper.report.pdf import write_pdf
from benchmarks.paper.report.web_page import write_html


def main() -> None:
    """Write everything, and say where it lies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("build/report"))
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    texts = write_pages()
    whole = "\n\n".join(texts.values())
    write_html(whole, PAGES, folder / "report.html")
    write_pdf(whole, PAGES, folder / "report.pdf")
    for path in (
        *(PAGES / f"{name}.md" for name in texts),
        folder / "report.html",
        folder / "report.pdf",
    ):
        print(path.resolve(), file=sys.stderr)


if __name__ == "__main__":
    main()
