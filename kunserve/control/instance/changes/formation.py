"""Becoming (part of) a group from nothing: an instance's part in fault tolerance (paper 4.4).

Whatever was going on is void. The instance pulls the layers that it lacks from peers that hold
them, and loads from disk what nobody can give. It enters the group once it has them all.
"""

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Form


class Formation:
    """From a ``Form`` until the layers that it needs are here. No step runs meanwhile."""

    def __init__(self, state: InstanceState, form: Form) -> None:
        layers = form.layout.layers_of(state.me)
        assert layers is not None, (state.me, form)
        self.form = form
        self.loaded_bytes = 0
        self._state = state
        self._layers = layers
        self._missing: list[tuple[LayerRange, InstanceId | None]] = []
        """Layers on their way here, and from whom; None is the disk."""
        state.mover.reset()
        state.to_self.clear()
        for request_id in state.table.request_ids():
            state.table.unpin(request_id, 0, state.table.num_blocks(request_id))
            state.free(request_id)
        self._is_mapped = not state.held.covers(layers)
        if self._is_mapped:
            self._pull_missing()

    @property
    def is_complete(self) -> bool:
        """Whether all layers are here."""
        return not self._missing

    def _pull_missing(self) -> None:
        """Map memory under the whole model, and fill what the group needs of it."""
        state = self._state
        state.table.set_layers(state.whole_model, state.spec.kv_units)
        state.body.memory.reclaim(state.whole_model)
        for gap in self._layers.without(state.held):
            self._pull(gap)

    def _pull(self, gap: LayerRange) -> None:
        """Fill consecutive layers: from the peers named, in order, and the rest from disk."""
        first = gap.first
        for source in sorted(self.form.sources, key=lambda source: source.layers):
            layers = source.layers.intersect(LayerRange(first, gap.end))
            if layers.num_layers and source.instance_id is not None:
                self._pull_from(LayerRange(first, layers.first), None)
                self._pull_from(layers, source.instance_id)
                first = layers.end
        self._pull_from(LayerRange(first, gap.end), None)

    def _pull_from(self, layers: LayerRange, src: InstanceId | None) -> None:
        if layers.num_layers:
            self.loaded_bytes += layers.num_layers * self._state.spec.layer_bytes
            self._missing.append((layers, src))
            self._state.mover.pull_layers(layers, src)

    def pulled(self, layers: LayerRange, src: InstanceId | None, ok: bool) -> None:
        """Layers have come; if a peer could not give them, the disk does."""
        if (layers, src) not in self._missing:
            return
        self._missing.remove((layers, src))
        if not ok:
            assert src is not None, layers
            self._missing.append((layers, None))
            self._state.mover.pull_layers(layers, None)

    def finish(self) -> None:
        """All layers are here: hold those of the group, as if it had always been so."""
        state = self._state
        if self._is_mapped:
            state.held = state.whole_model
            state.mover.offer_layers(state.held)
        state.specs.update((spec.instance_id, spec) for spec in self.form.specs)
        state.keep_only(self._layers)

    def cancel(self) -> None:
        """Another group is to be formed: what was here before it is still here."""
        state = self._state
        state.mover.reset()
        if self._is_mapped:
            remap = state.body.memory.drop(state.held)
            state.table.set_layers(state.held, remap.kv_units)


class FormationSlot:
    """Owner of the rule that the group asked for last is formed, and no other beside it."""

    def __init__(self, state: InstanceState) -> None:
        self._state = state
        self._asked: Form | None = None
        self._formation: Formation | None = None
        self.formed_id: GroupId | None = None
        """The last group that was formed from nothing; requests of older groups are not ours."""

    @property
    def is_asked(self) -> bool:
        """Whether a group is to be formed as soon as the running step has ended."""
        return self._asked is not None

    @property
    def is_forming(self) -> bool:
        """Whether a group is to be formed, and everything else waits for it."""
        return self._asked is not None or self._formation is not None

    def ask(self, form: Form) -> None:
        """Form this group, whatever was asked before."""
        self._asked = form

    def begin(self) -> None:
        """Start with what is asked for. No step runs."""
        assert self._asked is not None and not self._state.is_running, self._asked
        self._state.body.end_copies()
        if self._formation is not None:
            self._formation.cancel()
        self._formation, self._asked = Formation(self._state, self._asked), None

    def pulled(self, layers: LayerRange, src: InstanceId | None, ok: bool) -> None:
        """The mover filled weights, or could not."""
        if self._formation is not None:
            self._formation.pulled(layers, src, ok)

    def finish(self) -> Formation | None:
        """What is over now; None while layers are on their way here."""
        formation = self._formation
        if formation is None or not formation.is_complete:
            return None
        formation.finish()
        self._formation = None
        self.formed_id = formation.form.layout.group_id
        return formation
