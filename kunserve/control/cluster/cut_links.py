"""Instances that did not reach each other lately, though the front does: none merge."""

from kunserve.control.cluster.holds import Holds
from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import CutLink

Pair = tuple[InstanceId, InstanceId]
"""The lower number first."""
FIRST_HOLD_S = 30.0
MOST_PAIRS = 4096
MOST_TOLD = 8
"""Pairs that people are told of one by one."""


class CutLinks:
    """Owns which pairs are not to stand in one group for now."""

    def __init__(self) -> None:
        self._cuts: Holds[Pair] = Holds(FIRST_HOLD_S, MOST_PAIRS)

    def found(self, one: InstanceId, other: InstanceId, now_s: float) -> None:
        """One of the two could not reach the other just now."""
        self._cuts.found((one, other) if one < other else (other, one), now_s)

    def joined(self, members: tuple[InstanceId, ...]) -> None:
        """All of these have just reached each other."""
        self._cuts.forget(set(members).issuperset)

    def forget(self, instance_id: InstanceId) -> None:
        """Its process is gone; the next one may stand elsewhere."""
        self._cuts.forget(lambda pair: instance_id in pair)

    def pairs(self, now_s: float) -> tuple[Pair, ...]:
        """Who is to be kept apart now."""
        return tuple(self._cuts.held(now_s))

    def snapshots(self, now_s: float) -> tuple[CutLink, ...]:
        """The same for people."""
        held = self._cuts.held(now_s)
        return tuple(CutLink(*pair, held[pair]) for pair in sorted(held))

    def reason_texts(self, now_s: float) -> tuple[str, ...]:
        """Why some merges are not planned, for people."""
        cuts = self.snapshots(now_s)
        texts = [
            f"instances {cut.one} and {cut.other} do not reach each other: no drop merges them for "
            f"{cut.until_s - now_s:.0f} s more"
            for cut in cuts[:MOST_TOLD]
        ]
        if len(cuts) > MOST_TOLD:
            texts.append(f"neither do {len(cuts) - MOST_TOLD} pairs more")
        return tuple(texts)

    def check(self) -> None:
        """Assert the invariant."""
        self._cuts.check()
        assert all(one < other for one, other in self._cuts.held(0.0))
