"""The cluster's brain: dispatches requests, watches load, drives transitions, mends failures.

One per cluster, in the front's process. Sans-I/O: a driver feeds it events and carries out the
commands that ``drain`` returns, in order.
"""

from collections.abc import Sequence

from kunserve.control.cluster.commands import (
    Client,
    ControlCommand,
    LogTransition,
    Outbox,
    Respawn,
    ScaleDown,
    Send,
)
from kunserve.control.cluster.departures import Departures
from kunserve.control.cluster.forming import FormingWatch
from kunserve.control.cluster.instances import Instances
from kunserve.control.cluster.migrations import Migrations
from kunserve.control.cluster.overload import OverloadControl
from kunserve.control.cluster.peer_discovery import PeerDiscovery
from kunserve.control.cluster.placement import Placement
from kunserve.control.cluster.recovery import Recovery
from kunserve.control.cluster.requests.prompt_share import PromptShare
from kunserve.control.cluster.requests.quarantine import UNKNOWN, Blame
from kunserve.control.cluster.requests.redispatch import Redispatch
from kunserve.control.cluster.requests.requests import Requests
from kunserve.control.cluster.scaling import Scaling
from kunserve.control.cluster.transition import Phase, Transition
from kunserve.control.cluster.transitions import PATIENCE_STEPS, Transitions
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import (
    Alive,
    Committed,
    Event,
    ExchangeDone,
    Formed,
    LateContact,
    LayersLoaded,
    LinkBroken,
    MigrationOver,
    MigrationReady,
    Outputs,
    Prepared,
    Ready,
    Rejoin,
    Report,
    ResetPrefixCache,
    Returned,
    Tidied,
    TransferProgress,
)
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterSize, ClusterState, Kind, StageTime
from kunserve.policy.dispatch.choice import Shed, should_shed
from kunserve.policy.drop.restore import Postponed


class Controller:
    """See the module. Everything that happens goes through its public methods."""

    def __init__(self, plan: Plan, first_id: int = 0, num_places: int | None = None) -> None:
        """Ids of groups and transitions begin at ``first_id``, above those of earlier fronts.

        ``num_places``: instances that there are or are being started; as configured when None.
        """
        self._config = config = plan.config
        step_tokens = config.scheduler.max_num_batched_tokens
        self._outbox = outbox = Outbox()
        self.placement = placement = Placement(first_id)
        self._peer_discovery = peer_discovery = PeerDiscovery(
            outbox, self._partners, slow_s=self._slow_s
        )
        self.transitions = transitions = Transitions(placement, outbox, first_id, peer_discovery)
        self._instances = Instances(placement, peer_discovery, outbox)
        self._forming = FormingWatch(placement, outbox)
        self._requests = requests = Requests(
            placement,
            plan.blocks,
            step_tokens,
            config.cluster.dispatch_policy,
            outbox,
            config.scheduler.enable_prefix_caching and config.cluster.prefix_aware_dispatch,
        )
        self.balance = Migrations(
            config.overload,
            plan.blocks,
            config.scheduler.max_num_seqs,
            placement,
            transitions,
            requests,
            outbox,
            peer_discovery.introduce,
        )
        self._scaling = scaling = Scaling(
            config.cluster, placement, requests, outbox, self._give_back, num_places
        )
        self._departures = Departures(placement, requests, outbox, config.server.shutdown_timeout_s)
        self._redispatch = Redispatch(placement, requests, outbox, step_tokens)
        self._overload = OverloadControl(
            config.overload,
            config.cluster.pipeline_stages,
            config.instance.block_size,
            placement,
            transitions,
            requests,
            scaling,
            PromptShare(step_tokens, plan.measured.cost, placement),
            outbox,
        )
        self._recovery = Recovery(
            self._instances,
            placement,
            transitions,
            requests,
            self.balance,
            scaling,
            outbox,
            config.scheduler.max_num_seqs,
            self._partners,
        )

    def drain(self) -> list[ControlCommand]:
        """Commands since the last call, in order; ends of transitions behind everything else."""
        commands = self._outbox[:]
        self._outbox.clear()
        if LogTransition in map(type, commands):
            commands.sort(key=lambda command: isinstance(command, LogTransition))
        return commands

    # Requests

    def admit(self, request: Request) -> Shed | None:
        """Whether the queue limits refuse the request (it is not submitted by this call)."""
        limits = self._config.server
        if limits.max_num_queued_reqs is None and limits.max_num_queued_tokens is None:
            return None
        groups = self.placement.groups.values()
        # What has come back is in its leader's report still, and wherever it is now.
        returned = [group for group in groups if group.is_returned]
        num_twice = sum(group.num_returning for group in returned)
        num_blocks_twice = sum(group.returning_blocks for group in returned)
        backlog, block_size = self._requests.backlog, self._config.instance.block_size
        return should_shed(
            [group.load for group in groups],
            len(request.prompt_token_ids),
            num_backlog_reqs=len(backlog) - num_twice,
            num_backlog_tokens=backlog.num_tokens - num_blocks_twice * block_size,
            drop_may_help=any(
                t.record.kind is Kind.DROP and t.phase in (Phase.PREPARING, Phase.COMMITTING)
                for t in self.transitions.active.values()
            ),
            max_num_queued_reqs=limits.max_num_queued_reqs,
            max_num_queued_tokens=limits.max_num_queued_tokens,
        )

    @property
    def can_serve(self) -> bool:
        """Whether any group stands."""
        return bool(self.placement.groups)

    @property
    def is_settled(self) -> bool:
        """Whether no transition is under way, and every leader has reported."""
        groups = self.placement.groups.values()
        return not self.transitions.active and all(group.is_reported for group in groups)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def arrive(self, request: Request, client: Client, now_s: float) -> None:
        """A request to serve; it ends with exactly one finish reason unless cancelled.

        ``client`` comes back with every token, in a ``Deliver`` command.
        """
        self._requests.add(request, client, now_s)
        self._overload.watch(now_s)

    def cancel(self, request_id: RequestId) -> None:
        """The client is gone. Commands not drained yet may still name it."""
        self._requests.cancel(request_id)

    def give_up_waiting(self) -> tuple[RequestId, ...]:
        """No group stands, nor can one be expected: what waits for one ends with an error."""
        return self._requests.end_homeless()

    # Instances

    def on(self, instance_id: InstanceId, event: Event, now_s: float) -> None:
        """An instance's event."""
        match event:
            case Outputs():
                self._requests.deliver(event)
            case Returned():
                self._requests.returned(event)
            case Formed():
                self._instances.formed(event)
                self.placement.formed(event.group_id, event.instance_id)
                self._requests.place_if_changed()
            case Report():
                self._report(event, now_s)
            case Ready():
                self._ready(event, now_s)
            case Rejoin():
                self.rejoin((event,), now_s)
            case Prepared():
                self.transitions.on_prepared(event, now_s)
            case LayersLoaded():
                self.transitions.on_loaded(event, now_s)
            case Committed():
                self._committed(event, now_s)
            case ExchangeDone():
                self.transitions.on_exchanged(event, now_s)
            case Tidied():
                self.transitions.on_tidied(event)
            case TransferProgress():
                self.transitions.progressed(event.instance_id, now_s)
                self._forming.progressed(event.instance_id, now_s)
            case MigrationReady():
                self.balance.on_ready(event)
            case MigrationOver():
                self.balance.on_over(event)
            case LinkBroken():
                self._recovery.link_broken(event, now_s)
            case LateContact():
                self.transitions.cuts.joined((event.instance_id, event.peer))
            case Alive(wants_to_leave=True):
                self._departures.wish(event.instance_id, now_s)
            case Alive() | StageTime():
                pass

    def rejoin(self, events: Sequence[Rejoin], now_s: float) -> None:
        """Instances of an earlier front: those that come together may stand in one group again."""
        self._recovery.rejoin(events, now_s)
        self._requests.place()
        self._overload.watch(now_s)

    def _ready(self, event: Ready, now_s: float) -> None:
        instance_id = event.spec.instance_id
        self._departures.forget(instance_id)
        self._recovery.begin_anew((instance_id,), now_s)
        self._instances.ready(event)
        self._instances.form_alone(instance_id)
        self._requests.place()
        self._overload.watch(now_s)

    def _report(self, event: Report, now_s: float) -> None:
        self._instances.counted(event.instance_id, event.load.totals)
        group = self.placement.groups.get(event.load.group_id)
        if group is None or group.layout.leader != event.instance_id:
            return
        group.note_report(event.load, now_s)
        if self._config.cluster.dispatch_policy == "soonest":
            self._redispatch.watch(now_s)
        if event.load.group_id == self.placement.reserved:
            self._requests.place()
        self._requests.place_if_changed()
        self._overload.watch(now_s)
        self.balance.watch(now_s)

    def _committed(self, event: Committed, now_s: float) -> None:
        self._instances.counted(event.instance_id, event.totals)
        if event.transition_id not in self.transitions.active:
            return  # its members have formed anew since
        self._instances.committed(event)
        transition = self.transitions.on_committed(event, now_s)
        if transition is not None:
            self._relead(transition)

    def _relead(self, transition: Transition) -> None:
        """Requests of the old groups belong to the new leaders, as those have told."""
        record = transition.record
        default = {
            member: layout.leader for layout in record.groups_after for member in layout.members
        }
        old_leaders = [layout.leader for layout in record.groups_before]
        self._requests.relead(old_leaders, transition.followers, default)
        self._requests.place()

    def _partners(self, instance_id: InstanceId) -> set[InstanceId]:
        """With whom the instance may have something to speak about."""
        group = self.placement.with_member(instance_id)
        transition = self.transitions.with_member(instance_id)
        partners = self.balance.partners(instance_id)
        partners.update(() if group is None else group.layout.members)
        partners.update(() if transition is None else transition.members)
        return partners - {instance_id}

    def _slow_s(self, instance_id: InstanceId) -> float:
        """How long the instance may take to read what it is told: mail is read between steps."""
        group = self.placement.with_member(instance_id)
        return 0.0 if group is None else PATIENCE_STEPS * group.step_s

    def _give_back(self, instance_id: InstanceId) -> None:
        """The instance has drained, or has died and is not missed: forget it."""
        group = self.placement.led_by(instance_id)
        if group is not None:
            self.placement.remove((group.layout,))
        self.placement.forget(instance_id)
        self._instances.forget(instance_id)
        self.transitions.forget(instance_id)
        self._departures.forget(instance_id)
        self.balance.end_with((instance_id,))
        self._scaling.gave_back()
        self._outbox.append(ScaleDown(instance_id))

    def lost(
        self, instance_id: InstanceId, reason: str, now_s: float, blame: Blame = UNKNOWN
    ) -> None:
        """An instance died (paper section 4.4), or was killed for a reason that is known."""
        if not self._recovery.lost(instance_id, reason, now_s, blame):
            return
        self.transitions.forget(instance_id)
        self._departures.forget(instance_id)
        if self._scaling.lets_go(instance_id):
            self._give_back(instance_id)
            self._requests.place_if_changed()
        else:
            self._outbox.append(Respawn(instance_id))

    # Size

    @property
    def size(self) -> ClusterSize:
        """How many instances there shall be."""
        return self._scaling.size

    def resize(self, num_instances: int) -> None:
        """An operator asks for so many instances: the cluster goes there as it can."""
        self._scaling.resize(num_instances)
        self._scaling.pursue()
        self._requests.place_if_changed()

    def growth_refused(self, reason: str, now_s: float) -> None:
        """An instance that was ordered (``ScaleUp``) cannot be started, and nobody tries on."""
        self._scaling.refused(reason, now_s)

    # Overload

    def tick(self, now_s: float) -> None:
        """About ten times a second."""
        for transition in self.transitions.expire(now_s):
            self._recovery.give_up(transition, now_s)
        self._forming.look(now_s)
        kept = self._requests.quarantine.overdue(now_s)
        if kept is not None:
            self._recovery.begin_empty(kept.layout)
        limits = self._config
        self._requests.expire(
            now_s, limits.server.request_timeout_s, limits.cluster.start_timeout_s
        )
        self._scaling.pursue()
        self._departures.pursue(now_s)
        self._overload.watch(now_s)
        self._redispatch.empty_leaving(now_s)
        self.balance.drain(now_s)

    def force_drop(self, num_bytes: int | None, now_s: float) -> list[TransitionId]:
        """Drop at least that much, or by one merge; empty when nothing can be dropped."""
        return self._overload.force_drop(num_bytes, now_s)

    def force_restore(self, now_s: float) -> list[TransitionId | Postponed]:
        """Restore every dropped group, where it is possible now."""
        return self._overload.force_restore(now_s)

    def set_paused(self, paused: bool) -> None:
        """While paused, drops and restores are made by hand only. What is under way goes on."""
        self._overload.is_paused = paused

    def reset_prefix_cache(self) -> None:
        """Every group forgets the KV of equal beginnings that no request shares, also what is
        being moved.
        """
        for instance_id in sorted(self._instances.living):
            self._outbox.append(Send(instance_id, ResetPrefixCache()))
        self._requests.prefixes_reset()

    # Accounts

    def state(self, now_s: float) -> ClusterState:
        """Everything people and metrics see."""
        groups = tuple(self.placement.groups.values())
        observation = self._overload.observation
        return ClusterState(
            now_s=now_s,
            instances=self._instances.snapshots(),
            groups=tuple(group.layout for group in groups),
            loads=tuple(
                group.report.of_live(self._requests.num_at(group.layout.leader)) for group in groups
            ),
            transitions=self.transitions.latest(),
            num_drops=self.transitions.num_drops,
            num_restores=self.transitions.num_restores,
            num_unplaced=len(self._requests.backlog),
            num_moved=self._requests.num_moved,
            num_quarantined=self._requests.quarantine.num_quarantined,
            num_guilty=self._requests.quarantine.num_guilty,
            num_rerun=self._requests.num_rerun,
            num_deaths=self._recovery.num_deaths,
            size=self._scaling.size,
            is_scale_up_wanted=self._scaling.is_wanted(now_s),
            reasons=(
                *self._overload.reason_texts,
                *self._scaling.reason_texts(now_s),
                *self.transitions.cuts.reason_texts(now_s),
                *self.transitions.refusal_texts(now_s),
                *self._forming.reason_texts(now_s),
            ),
            paused=self._overload.is_paused,
            cut_links=self.transitions.cuts.snapshots(now_s),
            forming=self._forming.snapshots(),
            observed=None if observation is None else observation.totals,
        )

    def check(self) -> None:
        """Assert that placement is whole and that every live request has a living leader."""
        self.placement.check()
        self.balance.check()
        self.transitions.check()
        self._departures.check()
        self._peer_discovery.check()
        self._requests.check(self._instances.living)
