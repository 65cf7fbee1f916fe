"""Flags of the mechanism: when layers are dropped, and when they come back."""

import click

from kunserve.core.config import OverloadConfig
from kunserve.server.start.flags.option import FiniteRange, all_of, flags_of

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
        type=click.Choice(["recompute", "swap", "park", "migrate", "observe", "drop"]),
        help="When KV memory runs out: drop frees replicated layers; recompute preempts requests; "
        "swap sends their KV to host memory; park sends that of long answers there, for others to "
        "begin; migrate moves running requests to other instances; "
        "observe preempts too, and tells in the log and in /metrics what drop would have done.",
    ),
    _overload(
        "--forecast",
        "forecast_s",
        type=FiniteRange(0.0, 60.0),
        help="Drop when the demand of so many seconds ahead exceeds memory: about as long as a "
        "drop takes. 0 waits until memory is short.",
    ),
    _overload(
        "--dwell",
        "dwell_s",
        type=FiniteRange(0.0, 3600.0),
        help="Seconds between two transitions of one group, at least. Raise it if groups drop and "
        "restore in turns.",
    ),
    _overload(
        "--restore-below",
        type=FiniteRange(0.0, 1.0),
        help="Restore when demand is under this share of the undropped KV memory. 0: never.",
    ),
    _overload(
        "--restore-hold",
        "restore_hold_s",
        type=FiniteRange(0.0, 3600.0),
        help="Seconds that demand must stay there. Raise it above the pauses between your bursts, "
        "and each burst finds the memory it needs; lower it, and tokens are fast again sooner.",
    ),
    _overload(
        "--max-group-size",
        type=click.IntRange(min=2),
        help="Most instances that may share one copy of the weights [no limit]. 2 keeps pipelines "
        "short, and tokens fast.",
    ),
    _overload(
        "--min-deep-gain",
        type=FiniteRange(0.0),
        help="Memory that a pipeline of more than two stages must add, as a share of what it had. "
        "A deeper one frees less, and is slower.",
    ),
    _overload(
        "--max-queue-per-gain",
        type=FiniteRange(0.0, 1e9),
        help="Pairs that add little memory are made while what waits and finds no room is at most "
        "so many times what they free; for deeper pipelines it is one less. A longer queue waits "
        "for compute, of which pipelines have less.",
    ),
    _overload(
        "--max-park-s",
        type=FiniteRange(0.0, 3600.0, min_open=True),
        help="Longest pause of an answer that is parked in host memory, in seconds. Longer pauses "
        "let more requests begin.",
    ),
    _overload(
        "--park-behind-drop",
        is_flag=True,
        help="With drop: park answers where memory is short and nothing is left to drop.",
    ),
)
