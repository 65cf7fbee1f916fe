"""Instances that did not reach each other lately, though the front does: none merge.

Nobody tells when a cut link is whole again, so a pair is tried again after a while. Each time that
it is found cut once more, the while is twice as long.
"""

from dataclasses import dataclass

from kunserve.core.ids import InstanceId
from kunserve.core.snapshots import CutLink

Pair = tuple[InstanceId, InstanceId]
"""The lower number first."""
FIRST_HOLD_S = 30.0
LONGEST_HOLD_S = 480.0
MOST_PAIRS = 4096
"""With more, those are forgotten that would be tried first."""
MOST_TOLD = 8
"""Pairs that people are told of one by one."""


@dataclass(slots=True)
class _Cut:
    until_s: float
    hold_s: float


class CutLinks:
    """Owns which pairs are not to stand in one group for now."""

    def __init__(self) -> None:
        self._cuts: dict[Pair, _Cut] = {}

    def found(self, one: InstanceId, other: InstanceId, now_s: float) -> None:
        """One of the two could not reach the other just now."""
        pair = _pair(one, other)
        cut = self._cuts.get(pair)
        if cut is None or now_s > cut.until_s + cut.hold_s:
            cut = self._cuts[pair] = _Cut(now_s, FIRST_HOLD_S)
        elif now_s > cut.until_s:
            cut.hold_s = min(2.0 * cut.hold_s, LONGEST_HOLD_S)
        cut.until_s = now_s + cut.hold_s
        if len(self._cuts) > MOST_PAIRS:
            del self._cuts[min(self._cuts, key=lambda pair: (self._cuts[pair].until_s, pair))]

    def joined(self, members: tuple[InstanceId, ...]) -> None:
        """All of these have just reached each other."""
        if self._cuts:
            together = set(members)
            for pair in [pair for pair in self._cuts if together.issuperset(pair)]:
                del self._cuts[pair]

    def forget(self, instance_id: InstanceId) -> None:
        """Its process is gone; the next one may stand elsewhere."""
        for pair in [pair for pair in self._cuts if instance_id in pair]:
            del self._cuts[pair]

    def pairs(self, now_s: float) -> tuple[Pair, ...]:
        """Who is to be kept apart now."""
        return tuple(pair for pair, cut in self._cuts.items() if now_s <= cut.until_s)

    def snapshots(self, now_s: float) -> tuple[CutLink, ...]:
        """The same for people."""
        return tuple(CutLink(*pair, self._cuts[pair].until_s) for pair in sorted(self.pairs(now_s)))

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
        assert len(self._cuts) <= MOST_PAIRS
        assert all(one < other for one, other in self._cuts), self._cuts


def _pair(one: InstanceId, other: InstanceId) -> Pair:
    return (one, other) if one < other else (other, one)
