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
    "ablation.drop.tpot": "+21 to +31.9 %",
    "ablation.exchange.tpot": "P90 and P99.9 5 % lower",
    "ablation.lookahead.tpot": "4.5 / 10.6 / 9.7 % lower",
    "ablation.lookahead.output": "+20 %",
    "cost.blind": "up to 48 and 74 %",
    "restoration.tpot99": "1.2x lower",
    "extreme.gain": "+57 %",
    "extreme.rise": "42x",
}


def paper_values() -> dict[str, Text]:
    """``paper.NAME``."""
    return {f"paper.{name}": partial(str, figure) for name, figure in PAPER.items()}
