"""The faults that are kept to be planted are edits of the tree as it is."""

from tests.running.changed import ROOT
from tests.running.planted_faults import FAULTS


def test_each_fault_has_its_place() -> None:
    """A line that has changed has its fault changed as well."""
    places = {one["what"]: (ROOT / one["file"]).read_text().count(one["old"]) for one in FAULTS}
    assert len(places) == 23
    assert not {what: number for what, number in places.items() if number != 1}
