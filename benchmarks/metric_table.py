"""The table of docs/metrics.md: every metric of ``/metrics``, as the code describes it.

python -m benchmarks.metric_table
"""

from pathlib import Path

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from kunserve.server.telemetry.metric_row import Row, Type
from kunserve.server.telemetry.metrics import ROWS

DOCUMENT = Path("docs/metrics.md")
BEGIN, END = "<!-- metrics: made by benchmarks.metric_table -->\n", "<!-- metrics: end -->\n"
OURS, VLLM, PYTHON = "kunserve", "vLLM", "Python client"


def origin(name: str) -> str:
    """Who has defined the metric."""
    return {"vllm": VLLM, "kunserve": OURS}.get(name.partition(":")[0], PYTHON)


def process_families() -> list[Row[None]]:
    """What the Python client tells of the front's own process."""
    collectors = (
        ProcessCollector(registry=None),
        PlatformCollector(registry=None),
        GCCollector(_Silent()),  # type: ignore[arg-type]
    )
    found: list[Row[None]] = []
    for collector in collectors:
        for metric in collector.collect():
            suffix = "_total" if metric.type == Type.COUNTER else ""
            labels = tuple(metric.samples[0].labels) if metric.samples else ()
            meaning = metric.documentation.rstrip(".") + "."
            found.append(
                Row(metric.name + suffix, Type(metric.type), meaning, labels, lambda _: {})
            )
    return found


class _Silent:
    """A registry that takes everything and keeps nothing."""

    def register(self, collector: object) -> None:
        """Not kept."""


def rows() -> list[tuple[str, str, str, str, str]]:
    """Name, type, labels, origin and meaning."""
    families = [*ROWS, *process_families()]
    order = {VLLM: 0, OURS: 1, PYTHON: 2}
    families.sort(key=lambda family: (order[origin(family.name)], family.name))
    return [
        (
            f"`{family.name}`",
            family.type.value,
            ", ".join(f"`{label}`" for label in family.labels) or "none",
            origin(family.name),
            family.meaning,
        )
        for family in families
    ]


def table() -> str:
    """As Markdown."""
    head = ("name", "type", "labels", "whose", "meaning")
    lines = [head, ("---",) * len(head), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_table(text: str) -> str:
    """The document with the table as it should be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(write_table(DOCUMENT.read_text()))
