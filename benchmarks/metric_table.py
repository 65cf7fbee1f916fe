"""The table of docs/metrics.md: every metric of ``/metrics``, as the code describes it.

python -m benchmarks.metric_table
"""

from pathlib import Path

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

from kunserve.server.telemetry.metric_row import Row, Type
from kunserve.server.telemetry.metrics import ROWS

DOCUMENT = Path("docs/metrics.md")
BEGIN, END = "<!-- metrics: made by benchmarks.metric_table -->\n", "<!-- metrics: end -->\n"
EVERYWHERE = "model_name"
"""The label that each of them has. The page says so once."""


def process_families() -> list[Row[None]]:
    """What the Python client tells of the front's own process. The page only names it."""
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


def rows() -> list[tuple[str, str, str, str]]:
    """Name, type, further labels and meaning: vLLM's metrics first."""
    families = sorted(ROWS, key=lambda row: (not row.name.startswith("vllm:"), row.name))
    return [
        (
            f"`{family.name}`",
            family.type.value,
            ", ".join(f"`{label}`" for label in family.labels if label != EVERYWHERE),
            family.meaning,
        )
        for family in families
    ]


def table() -> str:
    """As Markdown."""
    head = "| name | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows())


def write_table(text: str) -> str:
    """The document with the table as it should be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(write_table(DOCUMENT.read_text()))
