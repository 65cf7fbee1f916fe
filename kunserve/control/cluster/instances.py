"""The instances that live, and what each last said of itself."""

from dataclasses import dataclass, field

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.control.cluster.peer_discovery import PeerDiscovery
from kunserve.control.cluster.placement import Placement
from kunserve.core.ids import InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import LeaderTotals
from kunserve.core.messages import Committed, Form, Formed, LayerSource, Ready, Rejoin
from kunserve.core.snapshots import InstanceSnapshot
from kunserve.policy.drop.restore import choose_sources


@dataclass(slots=True)
class _Instance:
    held: LayerRange
    kv_units: int
    totals: LeaderTotals = field(default_factory=LeaderTotals)
    """What its process has done, as it last said."""
    before: LeaderTotals = field(default_factory=LeaderTotals)
    """What its process had done when an earlier front counted it."""

    @property
    def done(self) -> LeaderTotals:
        """What this front counts of it."""
        return self.totals.since(self.before)


class Instances:
    """Owns who lives. ``Placement`` owns the specs of all that were ever ready."""

    def __init__(self, placement: Placement, peer_discovery: PeerDiscovery, outbox: Outbox) -> None:
        self._placement = placement
        self._peer_discovery = peer_discovery
        self._outbox = outbox
        self._living: dict[InstanceId, _Instance] = {}
        self._past: dict[InstanceId, LeaderTotals] = {}
        """What processes that died had done, by instance."""

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._living

    @property
    def living(self) -> set[InstanceId]:
        """Those that are ready and have not died."""
        return set(self._living)

    def ready(self, event: Ready) -> None:
        """An instance can be given a group."""
        spec = event.spec
        self._placement.specs[spec.instance_id] = spec
        whole = LayerRange(0, spec.num_layers)
        self._living[spec.instance_id] = _Instance(whole, spec.kv_units)
        self._peer_discovery.arrived(spec.instance_id, event.address)

    def rejoined(self, event: Rejoin) -> None:
        """An instance of an earlier front is back, with its weights."""
        self.ready(event.ready)
        instance = self._living[event.ready.spec.instance_id]
        instance.held, instance.kv_units = event.held, event.kv_units
        instance.before = event.totals

    def form_alone(self, instance_id: InstanceId) -> None:
        """Make it a group of its own, whatever it was before."""
        whole = LayerRange(0, self._placement.specs[instance_id].num_layers)
        self.form((Stage(instance_id, whole),))

    def form(self, stages: tuple[Stage, ...]) -> None:
        """Make them a new group without any request, whatever they were before."""
        layout = GroupLayout(self._placement.new_ids(1), stages)
        specs = self._placement.specs_of((layout,))
        self._placement.add(layout)
        self._placement.begin_forming(layout.group_id)
        self._peer_discovery.introduce(layout.members)
        sources = self._sources(layout)
        for member in layout.members:
            self._peer_discovery.introduce_to(member, sources)
            num_sent = self._placement.num_sent[member]
            self._outbox.append(Send(member, Form(layout, specs, sources, num_sent)))

    def _sources(self, layout: GroupLayout) -> tuple[LayerSource, ...]:
        """Who gives an instance the layers that it lacks to stand alone. Stages have theirs."""
        if len(layout.stages) > 1 or self._living[layout.leader].held == layout.stages[0].layers:
            return ()
        holders = {i: instance.held for i, instance in self._living.items()}
        given = self._peer_discovery.given
        (alone,) = choose_sources(layout, holders, self._placement.specs, given)
        return alone.sources

    def formed(self, event: Formed) -> None:
        """The instance stands in its new group, with all layers of its stage and no others."""
        instance = self._living.get(event.instance_id)
        group = self._placement.groups.get(event.group_id)
        layers = None if group is None else group.layout.layers_of(event.instance_id)
        if instance is None or layers is None:
            return
        self._peer_discovery.has_pulled(event.instance_id)
        if instance.held == layers:
            return
        spec = self._placement.specs[event.instance_id]
        instance.held = layers
        instance.kv_units = spec.units_when_holding(layers.num_layers)

    def committed(self, event: Committed) -> None:
        """A transition has changed what the instance holds."""
        instance = self._living.get(event.instance_id)
        if instance is not None:
            instance.held, instance.kv_units = event.held, event.kv_units

    def counted(self, instance_id: InstanceId, totals: LeaderTotals) -> None:
        """An instance says what it has done since its process started."""
        instance = self._living.get(instance_id)
        if instance is not None:
            instance.totals = totals  # seldom looked at, often told: the sums come later

    def forget(self, instance_id: InstanceId) -> bool:
        """It is gone. False if it was not known to live."""
        instance = self._living.pop(instance_id, None)
        if instance is None:
            return False
        self._peer_discovery.left(instance_id)
        self._past[instance_id] = self._past.get(instance_id, LeaderTotals()) + instance.done
        return True

    def snapshots(self) -> tuple[InstanceSnapshot, ...]:
        """Every instance that was ever ready, as people see it."""
        found = []
        for instance_id, spec in sorted(self._placement.specs.items()):
            instance = self._living.get(instance_id)
            past = self._past.get(instance_id, LeaderTotals())
            if instance is None:
                found.append(InstanceSnapshot(spec, False, LayerRange(0, 0), 0, past))
            else:
                held, kv_units = instance.held, instance.kv_units
                found.append(InstanceSnapshot(spec, True, held, kv_units, past + instance.done))
        return tuple(found)
