"""Pages with names instead of numbers: filled in from kept results, or not at all.

``{{name}}`` is a value, ``{{table:name}}`` and ``{{figure:name}}`` stand alone on a line,
``{{section:Title}}`` is a section of the same page, and ``[@key]`` cites a work. A name that
nobody knows is an error, and so is a figure that someone has typed (`typed_figures`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Text: TypeAlias = Callable[[], str]

_NAME = re.compile(r"\{\{([^{}]+)\}\}")
_CITED = re.compile(r"\[@([\w-]+)\]")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
UNNUMBERED = ("Abstract", "References")
"""Sections without a number."""
_NOT_TYPED = (
    _NAME,
    _CITED,
    re.compile(r"`[^`]*`"),  # commands, files, formulas
    re.compile(r"\]\([^)]*\)"),  # where links go
    re.compile(r"\bP\d\d(\.9)?\b"),
    re.compile(r"\b(Fig\.|Table|Algorithm|Eq\.) \d+[a-e]?(-[\da-e]+)?"),
    re.compile(
        r"EuroSys '26|\b(Qwen2\.5-)?\d+B\b|SmolLM2|AVX2"
        r"|\b[AH]\d00\b|\b(fp8|int4|bfloat16|float32)\b"
    ),
)
"""What may have digits: citations, and names of things."""
_FIGURE = re.compile(
    r"\d|\b(half|halves|(third|quarter|fifth|eighth|tenth|dozen|hundred|thousand)s?|percent"
    r"|twice (as|the|what)|(two|three|four|five|six|seven|eight|nine|ten)(fold| times))\b",
    re.IGNORECASE,
)
"""A digit, or a word that says a share or a ratio."""


class UnknownName(Exception):
    """A page asks for a name that nobody knows."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where names are looked up. Tables and figures come as Markdown."""

    values: Mapping[str, Text]
    tables: Mapping[str, Text]
    figures: Mapping[str, Text]
    references: Mapping[str, str]
    """What is printed of a work, by its key."""


def fill(page: str, sources: Sources) -> str:
    """The page as it is read. Raises `UnknownName`."""
    titles = [title for title in _HEADING.findall(page) if title not in UNNUMBERED]
    sections = {title: str(number) for number, title in enumerate(titles, start=1)}

    def heading(found: re.Match[str]) -> str:
        number = sections.get(found[1])
        return found[0] if number is None else f"## {number} {found[1]}"

    def named(found: re.Match[str]) -> str:
        return _filled(found[1], sources, sections)

    return _cited(_NAME.sub(named, _HEADING.sub(heading, page)), sources.references)


def typed_figures(page: str) -> list[str]:
    """Every line of a page with a figure that is no name, citation or command."""
    found = []
    for line in page.splitlines():
        rest = line
        for allowed in _NOT_TYPED:
            rest = allowed.sub("", rest)
        if _FIGURE.search(rest):
            found.append(line)
    return found


def _filled(name: str, sources: Sources, sections: Mapping[str, str]) -> str:
    kind, colon, rest = name.partition(":")
    if not colon:
        return _known(sources.values, name)()
    if kind == "section":
        return f"Section {_known(sections, rest)}"
    return _known(_known({"table": sources.tables, "figure": sources.figures}, kind), rest)()


def _known(names: Mapping[str, T], name: str) -> T:
    if name not in names:
        raise UnknownName(f"{name!r} is none of: {', '.join(sorted(names))}")
    return names[name]


def _cited(text: str, references: Mapping[str, str]) -> str:
    """Numbers in the order of citation, and the works below the last heading, if any is cited."""
    keys = list(dict.fromkeys(_CITED.findall(text)))
    if not keys:
        return text
    works = [f"{number}. {_known(references, key)}" for number, key in enumerate(keys, start=1)]
    text = _CITED.sub(lambda found: f"[{1 + keys.index(found[1])}]", text)
    return f"{text.rstrip()}\n\n" + "\n".join(works) + "\n"
