"""KV events: a reader that obeys them knows what the prefix cache has."""

from collections.abc import Generator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.group import cache_journal
from kunserve.control.group.cache_journal import CacheEvent, CacheJournal, Cleared, Removed, Stored
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.prefix import PrefixHash, prefix_hashes
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import SampledToken, StepResult
from kunserve.core.tokens import TokenIds
from kunserve_extras.kv_events import KvEvents

BLOCK = 4


class Follower:
    """What somebody outside knows of a cache."""

    def __init__(self) -> None:
        self.tokens: dict[PrefixHash, tuple[int, ...]] = {}
        self._ever: dict[PrefixHash, tuple[int, ...]] = {}
        """With those that are gone: a block may outlive the one before it."""

    def obey(self, events: list[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored(name, parent, token_ids):
                    before = () if parent is None else self._ever[parent]
                    assert len(token_ids) == BLOCK and name not in self.tokens
                    self.tokens[name] = self._ever[name] = (*before, *token_ids)
                case Removed(names):
                    for name in names:
                        del self.tokens[name]
                case Cleared():
                    self.tokens.clear()


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    tokens = tuple(SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples)
    scheduler.complete(StepResult(GroupId(0), plan.step_id, tokens), 0.0)
    scheduler.check()


ASKS = st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(1, 12))
"""Prompts that begin alike, their lengths and those of the answers."""


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(ASKS, max_size=4), st.integers(1, 12), st.booleans())))
def test_a_follower_knows_what_the_cache_has(
    turns: list[tuple[list[tuple[int, int, int]], int, bool]],
) -> None:
    """Through evictions and resets, and every name is that of the tokens that were told.

    Requests that come together compute equal blocks side by side, and one may leave before another.
    """
    journal, follower = CacheJournal(), Follower()
    limits = SchedulerConfig(8, 64)
    scheduler = Scheduler(limits, GroupId(0), 1, BLOCK, 12, frozenset(), 40, journal=journal)
    number = 0
    for asks, num_steps, resets in turns:
        for kind, length, num_output in asks:
            prompt, params = TokenIds([kind, *range(1, length)]), SamplingParams(num_output)
            number += 1
            scheduler.add(Request(RequestId(f"r{number}"), prompt, params, float(number)))
        for _ in range(num_steps):
            if not scheduler.has_work:
                break
            step(scheduler)
            follower.obey(journal.take())
            assert follower.tokens.keys() == {name for name, _ in scheduler.cache._index}
        if resets:
            scheduler.cache.reset()
    for name, tokens in follower.tokens.items():
        assert prefix_hashes(TokenIds(tokens), BLOCK)[-1] == name


def test_salted_requests_are_not_told_of() -> None:
    journal = CacheJournal()
    limits = SchedulerConfig(8, 64)
    scheduler = Scheduler(limits, GroupId(0), 1, BLOCK, 12, frozenset(), 60, journal=journal)
    params = SamplingParams(max_tokens=1)
    scheduler.add(Request(RequestId("a"), TokenIds(range(9)), params, 0.0, cache_salt="s"))
    step(scheduler)
    assert not journal.take()


def test_a_journal_that_nobody_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_journal, "MAX_EVENTS", 3)
    journal = CacheJournal()
    for number in range(4):
        journal.note(Removed((bytes([number]),)))
    assert journal.take() == [Cleared(), Removed((b"\3",))] and not journal.take()


@pytest.fixture
def published() -> Generator[tuple[KvEvents, zmq.Socket[bytes]], None, None]:
    publisher, context = KvEvents("tcp://127.0.0.1:0", 3, BLOCK), zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    reader.rcvtimeo = 20_000
    reader.connect(publisher.address)
    yield publisher, reader
    reader.close(linger=0)
    context.term()
    publisher.close()


def test_messages_are_those_of_vllm(published: tuple[KvEvents, Any]) -> None:
    publisher, reader = published
    while not reader.poll(50):  # until the subscription has come
        publisher.publish([Cleared()])
    topic, number, payload = reader.recv_multipart()
    first = int.from_bytes(number, "big")
    assert topic == b"" and msgspec.msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]
    while reader.poll(50):
        first = int.from_bytes(reader.recv_multipart()[1], "big")
    names = [bytes([0, 0, 0, 0, 0, 0, 1, number, 255, 255]) for number in range(2)]
    events = [Stored(names[1], names[0], (5, 6, 7, 8)), Removed((names[0],))]
    publisher.publish(events)
    publisher.publish([])
    _, number, payload = reader.recv_multipart()
    assert int.from_bytes(number, "big") == first + 1
    when_s, told, rank = msgspec.msgpack.decode(payload)
    assert when_s > 1e9 and rank == 3
    assert told == [
        {
            "type": "BlockStored",
            "block_hashes": [257],
            "parent_block_hash": 256,
            "token_ids": [5, 6, 7, 8],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [256], "medium": "GPU"},
    ]


@pytest.mark.parametrize("endpoint", ["ipc:///x", "tcp://*", "5557", "tcp://no.such.host.here:1"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv-events-endpoint"):
        KvEvents(endpoint, 0, BLOCK)
