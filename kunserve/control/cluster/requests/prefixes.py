"""What groups have computed lately, as far as the front knows: beginnings of prompts by name.

The front remembers what was computed where. It is not told what a group's cache has evicted, so
each group's memory is as long as the group's KV memory, and a guess that is wrong costs what not
guessing would cost. Beginnings are named at larger steps than blocks, because a guess need not be
exact.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import SentAhead
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.standing import Act
from kunserve.core.ids import GroupId
from kunserve.core.prefix import PrefixHash, prefix_hashes
from kunserve.core.request import Request
from kunserve.core.tokens import TokenIds
from kunserve.policy.dispatch.affinity import (
    NOTHING_SAVED,
    Saved,
    is_near,
    is_worth_waiting,
    per_instance,
)

NAMED_TOKENS = 64
"""Tokens from one name to the next, in whole blocks."""
MAX_NAMED_TOKENS = 1 << 16
"""Of one request: longer beginnings are alike beyond."""
MAX_HELD = 64
"""Looks at the backlog at which a request stays there for a group; then it goes to any."""
MAX_NAMES = 1 << 18
"""Of all groups together: some 50 MB."""


class PrefixIndex:
    """Names of one group, those used last at the end. Bounded.

    A name is never older than those that it begins: so if a group has a beginning, it has all
    shorter ones.
    """

    def __init__(self, number: int = 0) -> None:
        """``number`` tells indexes apart."""
        self.number = number
        self._names: OrderedDict[PrefixHash, None] = OrderedDict()

    def __iter__(self) -> Iterator[PrefixHash]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def depth(self, names: tuple[PrefixHash, ...]) -> int:
        """How many of a prompt's names are known, counted from its beginning."""
        if not names or names[0] not in self._names:
            return 0
        known, unknown = 1, len(names) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if names[middle - 1] in self._names:
                known = middle
            else:
                unknown = middle
        return known

    def add(self, names: tuple[PrefixHash, ...], at_most: int) -> list[PrefixHash]:
        """The group computes them; ``at_most`` are remembered, those used last.

        The names that are forgotten for it.
        """
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        num_surplus = max(0, len(self._names) - at_most)
        return [self._names.popitem(last=False)[0] for _ in range(num_surplus)]


class Prefixes:
    """Owner of the front's guess at what each group's prefix cache has."""

    def __init__(
        self, placement: Placement, ahead: SentAhead, block_size: int, is_on: bool = True
    ) -> None:
        """While it is not on, nothing has a name and nobody waits."""
        self._placement = placement
        self._ahead = ahead
        self._block_size = block_size
        self._is_on = is_on
        self._step_tokens = block_size * max(1, NAMED_TOKENS // block_size)
        self._by_group: dict[GroupId, PrefixIndex] = {}
        self._holders: dict[PrefixHash, dict[GroupId, None]] = {}
        """Groups by the shortest beginnings that they have: whoever lacks these has none."""
        self._num_indexes = 0
        self._version = placement.version
        self._held_tokens: Counter[GroupId] = Counter()
        """What the backlog keeps for each group, as of its last round."""

    def name(self, request: Request) -> tuple[PrefixHash, ...]:
        """The names of a request's beginnings; none where there is one instance to choose from."""
        if not self._has_choice:
            return ()
        return self._named(request.prompt_token_ids, request.cache_salt)

    @property
    def _has_choice(self) -> bool:
        return self._is_on and len(self._placement.specs) > 1

    def _named(
        self, tokens: TokenIds, salt: str, known: tuple[PrefixHash, ...] = ()
    ) -> tuple[PrefixHash, ...]:
        return prefix_hashes(TokenIds(tokens[:MAX_NAMED_TOKENS]), self._step_tokens, salt, known)

    def saved_tokens(self, live: Live) -> Saved:
        """Tokens of the prompt that each group has, those that have none left out.

        At least one token is computed anywhere, because its output is wanted; the whole prompt
        where its scores are.
        """
        if not live.names or live.request.num_to_score:
            return NOTHING_SAVED
        self._forget_gone()
        found = {}
        most = len(live.request.prompt_token_ids) - 1
        by_group = self._by_group
        holders = self._holders.get(live.names[0], ())
        for group_id in sorted(holders, key=lambda group_id: by_group[group_id].number):
            depth = by_group[group_id].depth(live.names)
            found[group_id] = min(most, depth * self._step_tokens)
        if live.returned_by is not None:
            # It was taken back from there to start sooner elsewhere.
            group = self._placement.led_by(live.returned_by)
            if group is not None:
                found.pop(group.layout.group_id, None)
        return found

    def in_blocks(self, saved_tokens: Saved) -> Saved:
        """The same in blocks."""
        if not saved_tokens:
            return NOTHING_SAVED
        return {group_id: tokens // self._block_size for group_id, tokens in saved_tokens.items()}

    @property
    def holds_any(self) -> bool:
        """Whether the backlog kept a request for a group when it was last gone through."""
        return bool(self._held_tokens)

    def begin_round(self) -> None:
        """The backlog is about to be gone through from its beginning."""
        self._held_tokens.clear()

    def holds(self, live: Live, saved_tokens: Saved, here: Group, num_blocks: int) -> bool:
        """Whether a request that ``here`` could be sent stays in the backlog for another group.

        That one has its beginning, is sent no more for now, and gets it to its first token sooner.
        """
        if not saved_tokens or live.num_held >= MAX_HELD:
            return False
        here_id, priority = here.layout.group_id, live.request.priority
        for group_id, tokens in saved_tokens.items():
            if group_id == here_id or not self._placement.may(group_id, Act.TAKE):
                continue
            group = self._placement.groups[group_id]
            leader, num_stages = group.layout.leader, len(group.layout.stages)
            load = group.load
            if (
                not self._ahead.has_room(leader, num_stages, priority)
                and load.demand_blocks + num_blocks <= load.capacity_blocks
                and is_near(per_instance(load), per_instance(here.load))
                and is_worth_waiting(
                    tokens,
                    (self._ahead.tokens(leader, priority) + self._held_tokens[group_id])
                    / num_stages,
                    saved_tokens.get(here_id, 0),
                    self._ahead.tokens(here.layout.leader, priority) / len(here.layout.stages),
                )
            ):
                live.num_held += 1
                self._held_tokens[group_id] += max(1, live.num_tokens - tokens)
                return True
        return False

    def computed(self, live: Live) -> None:
        """The request's leader has the KV of its prompt: it has made a token, or has taken it over.

        Not before, because who comes while it is computed would compute it too.
        """
        group = None if live.leader is None else self._placement.led_by(live.leader)
        if group is not None and not live.tokens_ahead:
            self._add(group.layout.group_id, live.names)

    def ended(self, live: Live) -> None:
        """The request has ended where it ran: its answer is the beginning of the next turn."""
        if not self._has_choice or live.leader is None:
            return
        group = self._placement.led_by(live.leader)
        if group is None:
            return
        prompt, answer = TokenIds(live.request.prompt_token_ids), TokenIds(live.output_token_ids)
        names = live.names
        if len(prompt) % self._step_tokens + len(answer) >= self._step_tokens:
            tokens = TokenIds.from_bytes(prompt.to_bytes() + answer.to_bytes())
            names = self._named(tokens, live.request.cache_salt, names)
        self._add(group.layout.group_id, names)

    def _add(self, group_id: GroupId, names: tuple[PrefixHash, ...]) -> None:
        group = self._placement.groups.get(group_id)
        if not names or group is None:
            return
        self._forget_gone()
        room = group.capacity_blocks * self._block_size // self._step_tokens
        at_most = min(room, MAX_NAMES // len(self._placement.groups))
        index = self._by_group.get(group_id)
        if index is None:
            self._num_indexes += 1
            index = self._by_group[group_id] = PrefixIndex(self._num_indexes)
        self._holders.setdefault(names[0], {})[group_id] = None
        for name in index.add(names, at_most):
            self._let_go(name, group_id)

    def _let_go(self, name: PrefixHash, group_id: GroupId) -> None:
        """The group has a beginning no more, if it was a shortest one."""
        holders = self._holders.get(name)
        if holders is not None:
            holders.pop(group_id, None)
            if not holders:
                del self._holders[name]

    def forget_all(self) -> None:
        """All caches are reset. What running requests share is learned anew."""
        self._by_group.clear()
        self._holders.clear()

    def _forget_gone(self) -> None:
        """Groups that stand no more: their caches are gone with them."""
        if self._version == self._placement.version:
            return
        self._version = self._placement.version
        for group_id in self._by_group.keys() - self._placement.groups.keys():
            for name in self._by_group.pop(group_id):
                self._let_go(name, group_id)

    def check(self, lives: Iterable[Live]) -> None:
        """Assert the bound, and that whoever has a beginning has the shorter ones."""
        assert all(len(index) <= MAX_NAMES for index in self._by_group.values())
        for name, holders in self._holders.items():
            assert holders and all(self._by_group[i].depth((name,)) for i in holders), holders
        for live in lives:
            first = live.names[:1]
            having = {i for i, index in self._by_group.items() if index.depth(first)}
            assert not first or having == {*self._holders.get(first[0], ())}, having
            for index in self._by_group.values():
                depth = index.depth(live.names)
                assert all(index.depth((name,)) for name in live.names[:depth])
                assert not any(index.depth((name,)) for name in live.names[depth:])
