"""The overload policy ``observe``: every drop and restore is decided, and none is made.

The monitor and Algorithm 1 see the groups as they would stand had they merged (``policy.imagine``).
So an operator learns from a day of real traffic what drops would have gained there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kunserve.control.cluster.commands import LogObserved, Outbox
from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import GroupLoad
from kunserve.core.snapshots import ObservedDrops
from kunserve.policy.drop.capacity import Specs, group_capacity_blocks
from kunserve.policy.drop.decide import DropView, plan_of
from kunserve.policy.drop.imagine import imagine_merged
from kunserve.policy.drop.monitor import (
    ClusterLoadView,
    Excuse,
    MonitorState,
    Overloaded,
    observe,
)
from kunserve.policy.drop.plan import Merge

FIRST_ID = 1 << 48
"""Imagined groups are numbered from here, so that no id is one of a real group."""


@dataclass(slots=True)
class _Imagined:
    """A merge that was not made."""

    layout: GroupLayout
    parts: tuple[GroupLayout, ...]
    """The real groups."""
    began_s: float
    formed_s: float
    """When it would have been committed."""
    capacity_blocks: int
    num_admitted: int = 0
    """Requests that would run now, and wait."""
    most_admitted: int = 0
    wait_s: float = 0.0


class Observation:
    """Knows which groups would be merged now, and what that would have gained so far."""

    def __init__(
        self, config: OverloadConfig, outbox: Outbox, name: Callable[[GroupId], str] = str
    ) -> None:
        """``name`` is what people call a real group."""
        self._config = config
        self._outbox = outbox
        self._name = name
        self._monitor = MonitorState()
        self._merged: dict[GroupId, _Imagined] = {}
        self._next_id = FIRST_ID
        self._looked_s: float | None = None
        self._totals = ObservedDrops()

    @property
    def totals(self) -> ObservedDrops:
        """What drops would have done so far."""
        num_now = sum(one.num_admitted for one in self._merged.values())
        return replace(self._totals, num_merged=len(self._merged), num_requests_now=num_now)

    @property
    def texts(self) -> tuple[str, ...]:
        """For people: what would stand now."""
        return tuple(
            f"groups {self._names(one.parts)} would be merged, and {one.num_admitted} more "
            "requests would run (observed only)"
            for one in self._merged.values()
        )

    def look(self, view: ClusterLoadView, real: DropView, now_s: float) -> list[Excuse]:
        """Called at every look at the load; what is to be said of each real group.

        ``real`` is what a drop would be planned of.
        """
        self._account(now_s)
        self._forget_changed(real.loads)
        seen = self._imagine(real, now_s)
        reported = tuple(load for load in seen.loads.values() if load.is_reported)
        view = replace(view, groups=reported)
        self._monitor, verdict = observe(self._monitor, view, now_s, self._config)
        if verdict.overloaded is not None:
            for merge in plan_of(seen, verdict.overloaded, self._config).merges:
                self._next_id += 1
                self._merge(merge, seen.specs, verdict.overloaded, now_s)
        if verdict.relaxed is not None:
            for group_id in verdict.relaxed.group_ids:
                self._restore(self._merged.pop(group_id, None), now_s)
        return [one for one in verdict.excuses if one.group_id not in self._merged]

    def _account(self, now_s: float) -> None:
        """What held at the last look held until now."""
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        for one in self._merged.values():
            one.wait_s += one.num_admitted * elapsed_s
            self._totals = replace(
                self._totals, wait_s=self._totals.wait_s + one.num_admitted * elapsed_s
            )

    def _forget_changed(self, loads: Mapping[GroupId, GroupLoad]) -> None:
        """Merges of groups that are not there any more, after a death or a drop by hand."""
        for group_id, one in tuple(self._merged.items()):
            if any(part.group_id not in loads for part in one.parts):
                del self._merged[group_id]

    def _imagine(self, real: DropView, now_s: float) -> DropView:
        """The same cluster, had the merges been made."""
        merged = {part.group_id for one in self._merged.values() for part in one.parts}
        layouts = [layout for layout in real.layouts if layout.group_id not in merged]
        loads = {i: load for i, load in real.loads.items() if i not in merged}
        untouchable, candidates = set(real.untouchable), set(real.candidates)
        for group_id, one in self._merged.items():
            parts = {part.group_id: real.loads[part.group_id] for part in one.parts}
            imagined = imagine_merged(
                group_id, one.capacity_blocks, one.formed_s, tuple(parts.values())
            )
            layouts.append(one.layout)
            loads[group_id] = imagined.load
            if now_s - one.formed_s < self._config.dwell_s or parts.keys() & untouchable:
                untouchable.add(group_id)
            if parts.keys() <= candidates:
                candidates.add(group_id)
            one.num_admitted = imagined.num_admitted
            more = max(0, one.num_admitted - one.most_admitted)
            one.most_admitted += more
            self._totals = replace(self._totals, num_requests=self._totals.num_requests + more)
        return replace(
            real,
            layouts=tuple(layouts),
            loads=loads,
            first_id=GroupId(self._next_id),
            untouchable=untouchable,
            candidates=candidates,
        )

    def _merge(self, merge: Merge, specs: Specs, verdict: Overloaded, now_s: float) -> None:
        earlier = [self._merged.pop(layout.group_id, None) for layout in merge.old]
        parts: list[GroupLayout] = []
        for layout, one in zip(merge.old, earlier, strict=True):
            parts += (layout,) if one is None else one.parts
        self._merged[merge.new.group_id] = _Imagined(
            merge.new,
            tuple(parts),
            began_s=min([now_s, *(one.began_s for one in earlier if one is not None)]),
            formed_s=now_s,
            capacity_blocks=group_capacity_blocks(merge.new, specs),
            most_admitted=sum(one.most_admitted for one in earlier if one is not None),
            wait_s=sum(one.wait_s for one in earlier if one is not None),
        )
        totals = self._totals
        self._totals = replace(
            totals,
            num_drops=totals.num_drops + 1,
            freed_bytes=totals.freed_bytes + merge.freed_bytes,
        )
        self._outbox.append(
            LogObserved(
                f"drop groups={self._names(parts)} bytes={merge.freed_bytes} "
                f"blocks={merge.gain_blocks} trigger={verdict.trigger!r} "
                f"memory_free_again_s={verdict.wait_s:.2f}"
            )
        )

    def _restore(self, one: _Imagined | None, now_s: float) -> None:
        if one is None:
            return
        self._totals = replace(self._totals, num_restores=self._totals.num_restores + 1)
        self._outbox.append(
            LogObserved(
                f"restore groups={self._names(one.parts)} after_s={now_s - one.began_s:.1f} "
                f"requests_admitted={one.most_admitted} waiting_avoided_s={one.wait_s:.1f}"
            )
        )

    def _names(self, groups: Iterable[GroupLayout]) -> str:
        return "+".join(self._name(layout.group_id) for layout in groups)
