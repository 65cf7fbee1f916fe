"""The report as one HTML file that needs nothing beside it."""

import base64
import re
from pathlib import Path

import markdown

_STYLE = """
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 Georgia, serif; }
table { border-collapse: collapse; font-size: 12px; margin: 1rem 0; display: block;
  overflow-x: auto; }
th, td { border-top: 1px solid #ccc; padding: 2px 8px; text-align: left; vertical-align: top; }
img { max-width: 100%; }
code { font-size: 85%; background: #f4f4f4; }
"""
_IMAGE = re.compile(r'src="([^":]+\.png)"')
_LINK = re.compile(r'<a href="(?!https?:|#)[^"]*">(.*?)</a>')


def write_html(text: str, folder: Path, path: Path) -> None:
    """``text`` is Markdown whose pictures lie in ``folder``. Links to other pages become text."""
    body = markdown.markdown(text, extensions=["tables", "sane_lists"])
    body = _IMAGE.sub(lambda found: f'src="{_inline(folder / found[1])}"', body)
    body = _LINK.sub(r"\1", body)
    title = text.splitlines()[0].removeprefix("# ")
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _inline(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
