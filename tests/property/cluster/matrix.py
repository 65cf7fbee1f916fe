"""Which pairs of what can happen meet in some random machine: ``matrix.md`` is written from here.

    python -m tests.property.cluster.matrix tests/property/cluster/matrix.md

Whoever adds a column to a machine adds its letter here. ``tests/documents/test_matrix.py`` proves
that the machines exist, and that those that draw from ``tests.chaos_schedules`` draw what is said.
"""

import sys
from pathlib import Path

COLUMNS = {
    "T": "groups drop, restore and exchange",
    "X": "requests share beginnings",
    "K": "KV goes to host memory: swapped, parked",
    "S": "guesses",
    "R": "KV in rings",
    "M": "live migration",
    "D": "instances die",
    "Q": "deaths speak against requests",
    "F": "the controller's process dies",
    "L": "words are lost, links are cut",
    "Z": "instances are ordered and given back",
    "A": "the real monitor decides",
    "H": "instances of one rank and of two",
    "W": "bad disks, silent and slow transfers, late first contact",
    "G": "an instance never comes back",
    "B": "instances of two sizes",
    "P": "several HTTP fronts die",
}
CLUSTER = "tests/property/cluster/"
MACHINES = {
    CLUSTER + "test_transitions.py::TransitionsMachine": "TXKMDQFB",
    CLUSTER + "test_cluster_metrics.py::MetricsMachine": "TXKMDQFB",
    CLUSTER + "test_kv_rings.py::RingsMachine": "TKRDQFB",
    CLUSTER + "test_guesses.py::test_every_request_has_its_own_tokens": "TXKSD",
    CLUSTER + "test_shared_prefixes.py::test_every_request_has_its_own_tokens": "TXK",
    CLUSTER + "test_draining.py::test_tokens_are_equal_and_blocks_are_freed_when_instances_leave": (
        "XKSMDZB"
    ),
    CLUSTER + "test_partitions.py::test_a_cut_at_any_moment_of_a_transition": "TL",
    CLUSTER + "test_simulated_worlds.py::test_not_even_when_an_instance_dies": "TKMDZA",
    CLUSTER + "test_chaos.py::test_chaos_leaves_every_request_ended_once_with_its_tokens": (
        "TXDQLZ"
    ),
    CLUSTER + "test_unequal_runs.py::"
    "test_a_client_gets_no_token_that_was_drawn_after_others_than_it_has": "TDL",
    CLUSTER + "test_lasting_faults.py::test_groups_change_by_hand_while_everything_goes_wrong": (
        "TXKSRMDQFLZHWGB"
    ),
    CLUSTER
    + "test_lasting_faults.py::test_the_monitor_changes_groups_while_everything_goes_wrong": (
        "TXKSRMDQFLZAHWGB"
    ),
    CLUSTER
    + "test_http_fronts.py::test_clients_of_living_fronts_get_their_tokens": "TXKSRMDQFLZAHWGBP",
}
EXCLUDED = {
    "XR": "what is in a ring is shared with nobody",
    "RM": "what is in a ring cannot move while its request runs",
}


def covered(one: str, other: str) -> bool:
    """Whether a machine has both."""
    return any(one in letters and other in letters for letters in MACHINES.values())


def page() -> str:
    """The whole of ``matrix.md``."""
    letters = list(COLUMNS)
    lines = [
        "# What meets what in random machines",
        "",
        "Written by `python -m tests.property.cluster.matrix`. `#`: some machine has both; `-`: it"
        " cannot be; `.`: nobody.",
        "",
        "| | " + " | ".join(letters[:-1]) + " | |",
        "|---" * (len(letters) + 1) + "|",
    ]
    for row, other in enumerate(letters):
        if row == 0:
            continue
        cells = [_cell(one, other) for one in letters[:row]]
        cells += [""] * (len(letters) - 1 - row)
        lines.append(f"| {other} | " + " | ".join(cells) + f" | {COLUMNS[other]} |")
    lines += ["", f"T: {COLUMNS['T']}.", ""]
    for pair, why in EXCLUDED.items():
        lines.append(f"* {pair[0]} with {pair[1]}: {why}.")
    lines += ["", "| machine | has |", "|---|---|"]
    lines += [f"| `{node}` | {has} |" for node, has in MACHINES.items()]
    return "\n".join(lines) + "\n"


def _cell(one: str, other: str) -> str:
    if one + other in EXCLUDED or other + one in EXCLUDED:
        return "-"
    return "#" if covered(one, other) else "."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
