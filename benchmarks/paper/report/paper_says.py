"""What the paper says and `claims` has not, by name: typed from its text once."""

from functools import partial

from benchmarks.paper.report.template import Text

PAPER = {
    # Section 2: the problem
    "rise": "twofold",
    "load": "56.3 %",
    "reliefs.vllm": "239x",
    "reliefs.infercept": "92x",
    "reliefs.llumnix": "148x",
    # Section 5: the evaluation
    "slo.factor": "4",
    "ablation.p99": "11.7 times",
    "cost.blind": "up to 48 and 74 %",
}


def paper_values() -> dict[str, Text]:
    """``paper.NAME``."""
    return {f"paper.{name}": partial(str, figure) for name, figure in PAPER.items()}
