"""Counts of structured outputs, and the time that compiling their forms takes."""

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from prometheus_client.metrics_core import Metric

from kunserve.core.request import StructuredOutput, StructureKind
from kunserve.server.api.forms.child import Verdict
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_family import counter, histogram

REQUESTS = counter(
    "kunserve:structured_requests_total",
    "HTTP requests for a structured output, by the kind of its form.",
    "kind",
)
REFUSED = counter(
    "kunserve:structured_refused_total",
    "Forms that could not be compiled; the same one is tried once.",
    "kind",
)
COMPILE_TIME = histogram(
    "kunserve:structured_compile_seconds", "Compiling a form that was not known, at the front."
)
FAMILIES = (REQUESTS, REFUSED, COMPILE_TIME)
COMPILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class FormMetrics:
    """What the front measures of forms."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._requests: Counter[StructureKind] = Counter()
        self._refused: Counter[StructureKind] = Counter()
        self._compile_s = Histogram(COMPILE_BUCKETS)

    def asked(self, form: StructuredOutput) -> None:
        """An HTTP request wants an output of this form."""
        self._requests[form.kind] += 1

    def tried(self, form: StructuredOutput, verdict: Verdict) -> None:
        """The form was compiled, or could not be."""
        self._compile_s.observe(verdict.compile_s)
        if verdict.error is not None:
            self._refused[form.kind] += 1

    def collect(self) -> Iterable[Metric]:
        """Every kind is there from the start."""
        name = self._model_name
        kinds: tuple[StructureKind, ...] = get_args(StructureKind)
        yield REQUESTS.of({(name, kind): float(self._requests[kind]) for kind in kinds})
        yield REFUSED.of({(name, kind): float(self._refused[kind]) for kind in kinds})
        yield COMPILE_TIME.of_histograms({(name,): self._compile_s})
