"""Counts of structured outputs, and the time that compiling their forms takes."""

from typing import get_args

from kunserve.core.request import StructuredOutput, StructureKind
from kunserve.server.api.forms.child import Verdict
from kunserve.server.telemetry.histogram import Histogram
from kunserve.server.telemetry.metric_row import Row, counter, histogram

COMPILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class FormMetrics:
    """What the front measures of forms."""

    def __init__(self) -> None:
        kinds: tuple[StructureKind, ...] = get_args(StructureKind)
        self.requests = dict.fromkeys(kinds, 0)
        self.refused = dict.fromkeys(kinds, 0)
        self.compile_s = Histogram(COMPILE_BUCKETS)

    def asked(self, form: StructuredOutput) -> None:
        """An HTTP request wants an output of this form."""
        self.requests[form.kind] += 1

    def tried(self, form: StructuredOutput, verdict: Verdict) -> None:
        """The form was compiled, or could not be."""
        self.compile_s.observe(verdict.compile_s)
        if verdict.error is not None:
            self.refused[form.kind] += 1


ROWS: tuple[Row[FormMetrics], ...] = (
    counter(
        "kunserve:structured_requests_total",
        "HTTP requests for a structured output, by the kind of its form.",
        lambda own: {(kind,): number for kind, number in own.requests.items()},
        "kind",
    ),
    counter(
        "kunserve:structured_refused_total",
        "Forms that could not be compiled; the same one is tried once.",
        lambda own: {(kind,): number for kind, number in own.refused.items()},
        "kind",
    ),
    histogram(
        "kunserve:structured_compile_seconds",
        "Compiling a form that was not known, at the front.",
        lambda own: own.compile_s,
    ),
)
