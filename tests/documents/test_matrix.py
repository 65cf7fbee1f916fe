"""``tests/property/cluster/matrix.md`` tells of machines that exist, and of what they draw."""

import importlib
from pathlib import Path

import pytest

from tests import chaos_schedules
from tests.property.cluster import test_http_fronts, test_lasting_faults
from tests.property.cluster.matrix import CLUSTER, COLUMNS, MACHINES, page

PAGE = Path(__file__).parents[1] / "property" / "cluster" / "matrix.md"
HARMS = {
    "D": chaos_schedules.DEATHS,
    "F": chaos_schedules.FRONTS,
    "L": chaos_schedules.LINKS,
    "Z": chaos_schedules.SIZE,
    "W": chaos_schedules.DISKS,
    "G": ("gone",),
    "P": ("http front",),
}
"""What a machine draws that has the column."""


def test_the_page_is_as_the_machines_say() -> None:
    assert PAGE.read_text() == page(), "python -m tests.property.cluster.matrix " + str(PAGE)


@pytest.mark.parametrize("node", MACHINES)
def test_a_machine_exists(node: str) -> None:
    path, name = node.split("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert callable(getattr(module, name))
    assert set(MACHINES[node]) <= COLUMNS.keys()


@pytest.mark.parametrize(
    ("node", "harms"),
    [
        (
            "test_lasting_faults.py::test_groups_change_by_hand_while_everything_goes_wrong",
            test_lasting_faults.BY_ORDER,
        ),
        (
            "test_lasting_faults.py::test_the_monitor_changes_groups_while_everything_goes_wrong",
            test_lasting_faults.BY_ITSELF,
        ),
        (
            "test_http_fronts.py::test_clients_of_living_fronts_get_their_tokens",
            test_http_fronts.HARMS,
        ),
    ],
)
def test_a_machine_draws_what_its_columns_say(node: str, harms: tuple[str, ...]) -> None:
    for letter, wanted in HARMS.items():
        assert (letter in MACHINES[CLUSTER + node]) == (set(wanted) <= set(harms)), letter
