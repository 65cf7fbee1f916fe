"""Flags of the mechanism: when layers are dropped, and when they come back."""

import click

from kunserve.core.config import OverloadConfig
from kunserve.server.flags.option import all_of, flags_of

GROUP = "Overload"
TEXT = (
    "Each group of instances is watched at every report. It is overloaded when its KV memory holds "
    "requests up, now or by the forecast. Then two groups merge into a pipeline: each instance "
    "keeps a part of the layers, and the other layers become KV memory. It is relaxed when its "
    "demand has been low for a while. Then the layers come back from the other instances."
)
_overload = flags_of(GROUP, OverloadConfig())

OVERLOAD_FLAGS = all_of(
    _overload(
        "--overload-policy",
        "policy",
        type=click.Choice(["recompute", "drop"]),
        help="When KV memory runs out: drop frees replicated layers, recompute preempts requests.",
    ),
    _overload(
        "--restore-below",
        type=click.FloatRange(0.0, 1.0),
        help="Restore when demand is under this share of the undropped KV memory.",
    ),
    _overload(
        "--max-group-size",
        type=click.IntRange(min=2),
        help="Most instances that may share one copy of the weights [no limit].",
    ),
    _overload(
        "--min-deep-gain",
        type=click.FloatRange(0.0),
        help="Memory that a pipeline of more than two stages must add, as a share of what it had.",
    ),
    _overload(
        "--link-gbps",
        type=click.FloatRange(min=0, min_open=True),
        help="Limit bulk transfers between instances, to study their cost.",
    ),
)
