"""The table of docs/results.md that has our engine beside others, one block per processor."""

from typing import Any

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import figures_of

OURS = "kunserve"
RATIOS = ("ours / vllm", "ours / best peer")


def peers() -> list[Row]:
    """Cases by servers; where a peer is ahead of us, its cell is in bold."""
    rows: list[Row] = []
    for processor, lines in _by_processor().items():
        names = [name for name in _names(lines) if name != OURS]
        rows.append((processor, OURS, *names, *RATIOS))
        for case in dict.fromkeys(line["settings"]["case"] for line in lines):
            of = {line["name"]: line["value"] for line in lines if line["settings"]["case"] == case}
            cells = [_cell(of, name, is_ahead=of[name] > of[OURS]) for name in names]
            ratios = [f"{of[name]:.2f}x" for name in RATIOS]
            rows.append((case, _cell(of, OURS, is_ahead=False), *cells, *ratios))
    return rows


def _by_processor() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in figures_of("peers"):
        settings = line["settings"]
        name = f"{settings['processor']}, {settings['kernels']}"
        found.setdefault(name, []).append(line)
    return found


def _names(lines: list[dict[str, Any]]) -> list[str]:
    """The servers, each with the format of its weights if that is another."""
    return list(
        dict.fromkeys(
            line["name"]
            for line in lines
            if "weights" in line["settings"] and not line["name"].endswith(("least", "most"))
        )
    )


def _cell(of: dict[str, float], name: str, *, is_ahead: bool) -> str:
    middle = f"{of[name]:,.0f}"
    if is_ahead:
        middle = f"**{middle}**"
    return f"{middle} ({of[f'{name}, least']:,.0f}-{of[f'{name}, most']:,.0f})"
