"""A cluster of fake instances to which everything happens that can go wrong, by order of a test."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kunserve.cluster.api import ServingLimits, limits_of
from kunserve.control.cluster.requests.quarantine import Blame, Cause
from kunserve.control.instance.work import Work
from kunserve.core.config import SpeculativeConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Event, Ready
from kunserve.core.request import FinishReason
from kunserve_lab.world.actions import Action, CompletePull, FinishStep
from kunserve_lab.world.by_choice import ChosenMember
from kunserve_lab.world.fake_body import expected_tokens
from tests.chaos_events import Endure, Happening, Harm, Load, Run, Setting, Wait
from tests.fake_cluster import place_of
from tests.faulty_cluster import TURN_S, FaultyCluster

MAX_INSTANCES = 5
"""To which operators let the cluster grow."""
MAX_DEATHS = 6
"""Of one schedule, those by poison left out."""
MAX_POISON = 2
MAX_ROUNDS = 3_000
"""Of everything that may happen, until all must have ended."""
MAX_BLAMED = 4
"""Deaths for which chance blames requests: of so many no innocent is convicted."""
SHORT_S = 3.0
"""More time than this passes at once only once: else requests would end for having waited."""
HANG_S = 10.0
"""After so much fair time a driver finds who hangs."""
START_S = 3.0
"""Of fair time, until a dead instance's next process is ready."""
LONG_TURN_S = 2.0
"""A turn of fair time where much passes."""
MOST_END_S = 900.0
"""Of fair time, until all must have ended though faults last."""


class ChaosCluster(FaultyCluster):
    """An in-process cluster with hung instances, some that never come back, and poison requests."""

    def __init__(
        self, setting: Setting, max_deaths: int = MAX_DEATHS, max_poison: int = MAX_POISON
    ) -> None:
        self.max_deaths = max_deaths
        self.max_poison = max_poison
        self.poison: set[RequestId] = set()
        self.hung: dict[InstanceId, float] = {}
        """And since when, in fair time."""
        self.gone: set[InstanceId] = set()
        """Instances that never come back."""
        self.num_deaths = 0
        self.num_blamed = 0
        self.num_poison_deaths: Counter[RequestId] = Counter()
        self.is_healing = False
        self.wanted: int | None = None
        """Instances that an operator asked this front for last."""
        self._died_s: dict[InstanceId, float] = {}
        self._has_jumped = False
        self._limits: ServingLimits | None = None
        """Of the first instances."""
        self._grows = setting.size is not None and setting.size.max_instances is not None
        super().__init__(
            pools=(setting.pool,) * setting.num_instances,
            swap=setting.swap,
            speculative=SpeculativeConfig(prompt_lookup_min=1) if setting.guesses else None,
            vocab_size=3 if setting.guesses else 1000,
            overload=setting.overload,
            size=setting.size,
            ranks=setting.ranks,
            max_num_seqs=setting.max_num_seqs,
            windows=setting.windows,
            caches=setting.windows is None,
            max_num_batched_tokens=16 if setting.windows is None else 4,
        )
        ready = [self.ready(member) for member in self.members.values()]
        self._limits = limits_of(tuple(ready), self.model.vocab_size)
        self._has_rings = setting.windows is not None
        spec = self._specs[InstanceId(0)]
        pools = setting.later_pools or (setting.pool,)
        for place in range(setting.num_instances, MAX_INSTANCES + 1):
            num_units = pools[place % len(pools)] * spec.num_layers
            more_bytes = (num_units - spec.kv_units) * spec.unit_bytes
            self._specs[InstanceId(place)] = replace(
                spec,
                instance_id=InstanceId(place),
                kv_units=num_units,
                memory_bytes=spec.memory_bytes + more_bytes,
            )

    # What happens by itself

    def actions(self) -> list[Action]:
        """Nothing happens in a hung instance; what it has sent is on its way."""
        return [action for action in super().actions() if place_of(action) not in self.hung]

    def perform(self, action: Action) -> None:
        """Let it happen; a step over poison kills its instance instead of ending.

        So does a disk that gives an error: no request is why.
        """
        if isinstance(action, FinishStep):
            work = self.members[action.instance_id].work
            assert work is not None
            if any(chunk.request_id in self.poison for chunk in work.step.plan.chunks):
                self._die_of_poison(action.instance_id, work)
                return
        if isinstance(action, CompletePull) and action.fails:
            pull = self.members[action.instance_id].mover.pulls[action.index]
            if pull.what.src is None:
                self._disk_error(action.instance_id)
                return
        super().perform(action)

    def _die_of_poison(self, instance_id: InstanceId, work: Work) -> None:
        """Every other process can say what was in its step."""
        chunks = tuple(chunk.request_id for chunk in work.step.plan.chunks)
        self.num_poison_deaths.update(self.poison.intersection(chunks))
        is_named = self.num_poison_deaths.total() % 2 == 0
        self.kill_instance(instance_id, Blame(Cause.INSIDE, chunks if is_named else ()))

    def _disk_error(self, instance_id: InstanceId) -> None:
        if self._may_die():
            self.num_deaths += 1
            self.kill_instance(instance_id, Blame(Cause.OUTSIDE))

    def _may_die(self) -> bool:
        return self.num_deaths < self.max_deaths

    def hear(self, src: InstanceId, message: Event) -> None:
        """A driver refuses who cannot hold what it may be sent, and starts nobody there again."""
        limits = self._limits
        if isinstance(message, Ready) and limits is not None and limits.shortfall(message):
            self.give_back(src)
            self.controller.growth_refused("it is too small", self.now_s)
            self.wanted = None
            self.carry_out()
            return
        super().hear(src, message)

    def pass_time(self, seconds: float) -> None:
        """Let time pass. A dead one is replaced at the end."""
        if self.is_healing:
            self.heal()
        super().pass_time(seconds)

    def jump(self, seconds: float) -> None:
        """Time passes in which nothing happens; minutes of it only once."""
        if seconds > SHORT_S:
            seconds, self._has_jumped = (SHORT_S if self._has_jumped else seconds), True
        self.pass_time(seconds)

    def report(self, member: ChosenMember) -> None:
        """Who hangs says nothing."""
        if member.instance_id not in self.hung:
            super().report(member)

    def endure(self, seconds: float, turn_s: float = TURN_S, num_open: int = 0) -> None:
        """Fair time passes: a driver finds who hangs, and has somebody in the place of the dead."""
        until_s = self.fair_s + seconds
        while self.fair_s < until_s:
            while len(self.unfinished) < num_open:
                self.request(5, 10)
            super().endure(turn_s / 2, turn_s)  # one turn
            for instance_id, since_s in sorted(self.hung.items()):
                if self.fair_s - since_s > HANG_S:
                    self._lose_hung(instance_id)
            self._start_dead()
            for instance_id in sorted(self.late):
                self.meet_front(instance_id)

    def _start_dead(self) -> None:
        self._died_s = {i: self._died_s.get(i, self.fair_s) for i in self.dead}
        for instance_id, died_s in sorted(self._died_s.items()):
            if self.fair_s - died_s > START_S and self._may_start(instance_id):
                self.start_instance(instance_id)
        while self.num_ordered and self._free_id() is not None:
            self._start_ordered()

    def _may_start(self, instance_id: InstanceId) -> bool:
        """Not whose GPU is gone; and who cannot read its disk does not come up."""
        return instance_id not in self.gone | self.bad_disks

    def check(self) -> None:
        """Every owner's invariants; and who is there, dead or ordered has a place."""
        super().check()
        num_places = len({*self.members, *self.dead}) + self.num_ordered
        assert self.controller._scaling._num_places == num_places, num_places

    # What goes wrong, or is asked for

    def harm(self, kind: str, which: int) -> None:
        """One thing goes wrong, if it can."""
        living = [i for i in sorted(self.members) if i not in self.hung]
        match kind:
            case "kill" | "blame" | "gone" | "hang" if living and self._may_die():
                self._strike(kind, living[which % len(living)], which)
            case "start" if self.hung:
                self._lose_hung(sorted(self.hung)[which % len(self.hung)])
            case "start" if self.late:
                self.meet_front(sorted(self.late)[which % len(self.late)])
            case "start" if found := [i for i in self.dead if self._may_start(i)]:
                self.start_instance(found[which % len(found)])
            case "start" if self.num_ordered and self._free_id() is not None:
                self._start_ordered()
            case "resize":
                is_safe = not self.gone | self.bad_disks  # else nobody may be left but those
                self.wanted = 1 + which % MAX_INSTANCES if is_safe else MAX_INSTANCES
                self.resize(self.wanted)
            case "cancel" if self.unfinished:
                self.cancel(self.unfinished[which % len(self.unfinished)])
            case "lose" | "double" if full := self._links_in_use():
                src, dst = full[which % len(full)]
                (self.lose if kind == "lose" else self.double)(src, dst)
            case "front" | "late front":
                self._lose_front(kind, which)
            case "stick" if under_way := [pull for _, pull in self.pulls()]:
                self.stuck.append(under_way[which % len(under_way)])
            case "slow" if under_way := [pull for _, pull in self.pulls()]:
                self.slow_down(under_way[which % len(under_way)])
            case "bad disk" if living and self._leaves_one_whole(living[which % len(living)]):
                self.bad_disks.add(living[which % len(living)])
            case "disk error" if loads := [i for i, p in self.pulls() if p.what.src is None]:
                self._disk_error(loads[which % len(loads)])
            case "part" if len(living) > 1:
                draw = random.Random(which)
                one, other = draw.sample(living, 2)
                self.part(one, other)
            case "meet" if self.apart:
                self.meet(sorted(self.apart, key=sorted)[which % len(self.apart)])
            case _:
                self._ask(kind, which)

    def _ask(self, kind: str, which: int) -> None:
        """By hand."""
        match kind:
            case "drop":
                self.controller.force_drop(None, self.now_s)
                self.carry_out()
            case "restore":
                merged = [group for group in self.groups() if len(group.stages) > 1]
                if merged:
                    self.restore(merged[which % len(merged)])
            case "call off":
                active = sorted(self.controller.transitions.active)
                if active:
                    self.roll_back(active[which % len(active)])
            case "migrate" if not self._has_rings:
                singles = [g.group_id for g in self.groups() if len(g.stages) == 1]
                free = [g for g in singles if g not in self.controller.placement.migrating]
                if len(free) > 1:
                    self.migrate(free[which % len(free)], free[which % len(free) - 1])
            case "park" if groups := self.groups():
                self.allow_parking(groups[which % len(groups)])
            case "reset cache":
                self.reset_prefix_cache()

    def _strike(self, kind: str, victim: InstanceId, which: int) -> None:
        if kind == "gone" and not self._leaves_one_whole(victim):
            return
        if kind == "blame" and self.num_blamed >= MAX_BLAMED:
            return
        self.num_deaths += 1
        if kind == "hang":
            self.hung[victim] = self.fair_s
            return
        self.hung.pop(victim, None)
        if kind == "gone" or (
            kind == "blame" and which % 4 == 3 and self._leaves_one_whole(victim)
        ):
            self.gone.add(victim)
        if kind == "blame":
            self.num_blamed += 1
            self.kill_instance(victim, Blame(Cause.INSIDE))
        else:
            self.kill_instance(victim, Blame([Cause.NOBODY, Cause.OUTSIDE][which % 2]))

    def _leaves_one_whole(self, victim: InstanceId) -> bool:
        """Whether somebody else is there that can always serve, and is not given back."""
        if self._grows:
            return False
        places = {*self.members, *self.dead}
        num_leaving = 0 if self.wanted is None else max(0, len(places) - self.wanted)
        return len(places - self.gone - self.bad_disks - {victim}) > num_leaving

    def _lose_front(self, kind: str, which: int) -> None:
        for instance_id in sorted(self.hung):
            self._lose_hung(instance_id)
        late = set()
        if kind == "late front":
            late = {i for i in self.members if (i + which) % 2}
        self.restart_front(loses_mail=bool(which % 2), keeps_mail=which % 4 == 2, late=late)
        self.wanted = None

    def _lose_hung(self, instance_id: InstanceId) -> None:
        del self.hung[instance_id]
        self.num_blamed += 1
        self.kill_instance(instance_id, Blame(Cause.INSIDE))

    def _links_in_use(self) -> list[tuple[InstanceId, InstanceId]]:
        """Between instances, with something on its way."""
        return [
            (src, dst)
            for (src, dst), letters in self.links.items()
            if src is not None and dst is not None and letters
        ]

    # The end

    def heal(self) -> None:
        """Every fault is mended: a driver finds who hangs, and starts whoever is dead."""
        self.is_healing = True
        self.gone.clear()
        self.bad_disks.clear()
        self.stuck.clear()
        self.slow.clear()
        for pair in tuple(self.apart):
            self.meet(pair)
        for instance_id in sorted(self.hung):
            self._lose_hung(instance_id)
        for instance_id in sorted(self.late):
            self.meet_front(instance_id)
        for instance_id in list(self.dead):
            self.start_instance(instance_id)
        while self.num_ordered:
            self._start_ordered()

    def outlive(self) -> None:
        """Faults last; but whoever is whole serves on, and every request ends."""
        until_s = self.fair_s + MOST_END_S
        while self.unfinished:
            assert self.fair_s < until_s, f"no end: {self.unfinished}"
            self.endure(10.0, LONG_TURN_S)
        self.prove_tokens()

    def _free_id(self) -> InstanceId | None:
        taken = {*self.members, *self.dead}
        free = [i for i in map(InstanceId, range(MAX_INSTANCES)) if i not in taken]
        return next(iter(free), None)

    def _start_ordered(self) -> None:
        free = self._free_id()
        if free is None:  # as one that came when another place was about to be given up
            free = InstanceId(MAX_INSTANCES)
        self.start_ordered(free)

    def finish(self) -> None:
        """Run to the end of every request and prove everything; fail soon if there is none."""
        self.run_until_idle(max_actions=MAX_ROUNDS)
        self.pass_time(SHORT_S)  # if the last word was lost, it is missed when counts are compared
        self.run_until_idle(max_actions=MAX_ROUNDS)
        if self.wanted is not None and not self._grows:
            self._prove_size(self.wanted)
        self.check_empty()
        self.prove_tokens()

    def give_back(self, instance_id: InstanceId) -> None:
        """The cluster does without it."""
        super().give_back(instance_id)
        self.hung.pop(instance_id, None)

    def _prove_size(self, wanted: int) -> None:
        """The cluster gets to the size that was asked for, once its pipelines are restored."""
        for _ in range(20):
            if len(self.members) == wanted:
                break
            for group in self.groups():
                if len(group.stages) > 1:
                    self.restore(group)
            self.run_until_idle(max_actions=MAX_ROUNDS)
            self.pass_time(0.6)
        assert len(self.members) == wanted, (sorted(self.members), wanted)
        size = self.controller.state(self.now_s).size
        assert (size.wanted, size.ordered, size.leaving) == (wanted, 0, 0), size

    def prove_tokens(self) -> None:
        """Poison ends with an error, after a few deaths, and nothing else does.

        A poison request kills twice among others, once for each halving of what may run at once,
        and twice more alone. Each death of another cause may have it released once.
        """
        for request_id, num_deaths in self.num_poison_deaths.items():
            others = self.num_deaths + self.num_poison_deaths.total() - num_deaths
            assert num_deaths <= 2 + 4 + 2 + others, (request_id, self.num_poison_deaths)
        for request_id, account in self.accounts.items():
            true = expected_tokens(account.request, self.model, self.max_model_len)
            got = tuple(account.token_ids)
            assert got == true[: len(got)], (request_id, got, true)
            if account.is_cancelled:
                continue
            assert account.end is not None, request_id
            if request_id in self.poison:
                assert account.end is FinishReason.ERROR, (request_id, account)
            else:
                assert account.end is not FinishReason.ERROR, (request_id, account)
                assert got == true, (request_id, got, true)


def play(cluster: ChaosCluster, schedule: Iterable[Happening]) -> None:
    """Have it all happen, one after the other."""
    for event in schedule:
        match event:
            case Load(count, num_prompt, max_tokens, is_poison, num_common):
                for _ in range(count):
                    request_id = cluster.request(num_prompt, max_tokens, num_common=num_common)
                    if is_poison and len(cluster.poison) < cluster.max_poison:
                        cluster.poison.add(request_id)
            case Run(num_actions, seed):
                _run(cluster, num_actions, random.Random(seed))
            case Wait(seconds):
                cluster.jump(seconds)
            case Endure(seconds, num_open):
                cluster.endure(seconds, min(LONG_TURN_S, seconds / 10.0), num_open)
            case Harm(kind, which):
                cluster.harm(kind, which)


def _run(cluster: ChaosCluster, num_actions: int, draw: random.Random) -> None:
    for _ in range(num_actions):
        found = cluster.actions()
        if not found:
            break
        action = draw.choice(found)
        if isinstance(action, CompletePull) and draw.random() < 0.1:
            pull = cluster.members[action.instance_id].mover.pulls[action.index]
            action = replace(action, fails=pull.what.src is not None)
        cluster.perform(action)
    cluster.check()
