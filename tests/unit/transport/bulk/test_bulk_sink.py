import numpy as np
import pytest

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerPull
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.sink import RETRY_S, BulkSink
from kunserve.transport.bulk.wire import Answer, KvChunk, LayerChunk
from tests.unit.transport.bulk_world import LAYER_BYTES, UNIT_BYTES, Memory, entries, piece

PACING = BulkPacing(
    chunk_bytes=2 * UNIT_BYTES, max_in_flight=2, chunk_timeout_s=10.0, unknown_grace_s=1.0
)
ZERO, ONE = InstanceId(0), InstanceId(1)


def sink(pacing: BulkPacing = PACING) -> tuple[BulkSink, Memory]:
    memory = Memory(60)
    return BulkSink(memory, pacing), memory


def some_bytes(num: int, value: int = 5) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(num, value, np.uint8)


def test_few_chunks_in_flight_in_the_order_asked() -> None:
    made, memory = sink()
    first, second = piece("a", 0, (0, 3), (0, 1)), piece("b", 1, (0, 1), (4, 5))
    made.pull_kv(first, entries(10))
    made.pull_kv(second, entries(20))
    a = made.next_ask(0.0)
    b = made.next_ask(0.0)
    assert made.next_ask(0.0) is None, "two in flight"
    assert a == (ZERO, KvChunk(0, 1, "a", (0, 3), (0, 1), 0, 2))
    assert b == (ZERO, KvChunk(1, 1, "a", (0, 3), (0, 1), 2, 1))
    made.check()
    made.on_reply(1, Answer.DATA, some_bytes(UNIT_BYTES, 2), 1.0)
    assert made.next_ask(1.0) == (ONE, KvChunk(2, 1, "b", (0, 1), (4, 5), 0, 1))
    made.on_reply(0, Answer.DATA, some_bytes(2 * UNIT_BYTES, 1), 2.0)
    made.on_reply(2, Answer.DATA, some_bytes(UNIT_BYTES, 3), 3.0)
    done = made.drain()
    assert [d.what for d in done] == [first, second]
    assert all(d.ok for d in done)
    assert made.num_bytes == 4 * UNIT_BYTES
    values = memory.kv.reshape(-1, UNIT_BYTES)[[9, 10, 11, 12, 13, 19, 20, 21], 0]
    assert values.tolist() == [0, 1, 1, 2, 0, 0, 3, 0]
    assert made.num_pulls == 0 and made.drain() == [] and made.wait_s(3.0) is None


def test_weights_chunk_within_layers() -> None:
    made, memory = sink(BulkPacing(chunk_bytes=LAYER_BYTES - 200, max_in_flight=1))
    what = LayerPull(LayerRange(2, 4), ONE)
    made.pull_layers(what)
    asked = []
    while (ask := made.next_ask(0.0)) is not None:
        _, chunk = ask
        assert isinstance(chunk, LayerChunk)
        asked.append((chunk.layer, chunk.offset, chunk.num_bytes))
        made.on_reply(chunk.ticket, Answer.DATA, some_bytes(chunk.num_bytes), 0.0)
        made.check()
    assert asked == [(2, 0, 800), (2, 800, 200), (3, 0, 800), (3, 800, 200)]
    assert [d.what for d in made.drain()] == [what]
    assert (memory.weights == 5).sum() == 2 * LAYER_BYTES


def test_of_sources_that_are_read_many_places_are_asked_for_ahead() -> None:
    pacing = BulkPacing(UNIT_BYTES, read_chunk_bytes=UNIT_BYTES, max_read_in_flight=5)
    made = BulkSink(Memory(60), pacing, has_read=lambda src: src == ONE)
    made.pull_kv(piece("sent", 0, (0, 6), (0, 1)), entries(0))
    made.pull_kv(piece("read", 1, (0, 6), (0, 1)), entries(10))

    def ask_all() -> list[InstanceId]:
        asked = []
        while (ask := made.next_ask(0.0)) is not None:
            asked.append(ask[0])
            made.check()
        return asked

    assert ask_all() == [ZERO, ZERO, ONE, ONE, ONE]
    assert made.wait_s(0.0) == pacing.stall_s, "nothing to do until an answer comes"
    made.on_reply(2, Answer.DATA, some_bytes(UNIT_BYTES), 0.0)
    made.on_reply(0, Answer.DATA, some_bytes(UNIT_BYTES), 0.0)
    assert ask_all() == [ONE, ONE], "what is sent has its own bound"


def test_not_yet_is_asked_again_and_holds_up_nobody() -> None:
    made, _ = sink()
    made.pull_kv(piece("late", 0, (0, 3), (0, 1)), entries(10))
    made.pull_kv(piece("b", 1, (0, 1), (0, 1)), entries(20))
    made.next_ask(0.0)
    made.on_reply(0, Answer.NOT_YET, None, 0.5)
    made.check()
    ask = made.next_ask(0.5)
    assert ask is not None and ask[0] == ONE, "the next request goes first meanwhile"
    assert made.next_ask(0.5) is None
    assert made.wait_s(0.5) == pytest.approx(RETRY_S)
    ask = made.next_ask(0.5 + RETRY_S)
    assert ask == (ZERO, KvChunk(2, 1, "late", (0, 3), (0, 1), 0, 2))
    made.on_reply(1, Answer.DATA, some_bytes(UNIT_BYTES), 0.6)
    made.on_reply(2, Answer.DATA, some_bytes(2 * UNIT_BYTES), 0.6)
    ask = made.next_ask(0.6)
    assert ask == (ZERO, KvChunk(3, 1, "late", (0, 3), (0, 1), 2, 1))
    made.on_reply(3, Answer.DATA, some_bytes(UNIT_BYTES), 0.7)
    assert [d.ok for d in made.drain()] == [True, True]


def test_not_yet_for_too_long() -> None:
    made, _ = sink()
    made.pull_kv(piece("r", 0, (0, 3), (0, 1)), entries(10))
    now_s = 0.0
    while made.num_pulls:
        ask = made.next_ask(now_s)
        assert ask is not None
        made.on_reply(ask[1].ticket, Answer.NOT_YET, None, now_s)
        now_s += 0.3
    assert [d.refusal for d in made.drain()] == ["the source never heard of it"]
    assert 1.0 < now_s < 2.0


def test_a_refusal_ends_the_pull_and_late_answers_touch_nothing() -> None:
    made, memory = sink()
    made.pull_kv(piece("r", 0, (0, 3), (0, 2)), entries(10, 20))
    made.next_ask(0.0)
    made.next_ask(0.0)
    made.on_reply(0, Answer.REFUSED, None, 0.0)
    assert [d.refusal for d in made.drain()] == ["the source has withdrawn it"]
    made.on_reply(1, Answer.DATA, some_bytes(2 * UNIT_BYTES), 0.0)
    assert not memory.kv.any() and made.drain() == []


def test_an_answer_that_names_no_place_ends_the_pull() -> None:
    made, _ = sink()
    made.pull_kv(piece("r", 0, (0, 3), (0, 1)), entries(10))
    made.next_ask(0.0)
    made.on_reply(0, Answer.LOCATED, None, 0.0)
    assert [d.refusal for d in made.drain()] == ["the source did not say where it lies"]


def test_chunks_of_another_size_are_refused() -> None:
    made, memory = sink()
    made.pull_kv(piece("r", 0, (0, 3), (0, 1)), entries(10))
    made.pull_layers(LayerPull(LayerRange(0, 1), ONE))
    made.next_ask(0.0)
    made.on_reply(0, Answer.DATA, some_bytes(5), 0.0)
    made.next_ask(0.0)
    made.on_reply(1, Answer.DATA, None, 0.0)
    assert [d.ok for d in made.drain()] == [False, False]
    assert not memory.kv.any() and not memory.weights.any()


@pytest.mark.parametrize("num_bytes", [0, 1, LAYER_BYTES - 1, LAYER_BYTES + 1])
def test_weights_of_another_size_are_refused_and_not_written(num_bytes: int) -> None:
    made, memory = sink(BulkPacing(chunk_bytes=LAYER_BYTES))
    made.pull_layers(LayerPull(LayerRange(0, 1), ONE))
    made.next_ask(0.0)
    made.on_reply(0, Answer.DATA, some_bytes(num_bytes), 0.0)
    assert [d.refusal for d in made.drain()] == ["the source sent a chunk of another size"]
    assert not memory.weights.any()


def test_a_silent_source_and_a_lost_one() -> None:
    made, _ = sink()
    made.pull_kv(piece("a", 0, (0, 3), (0, 1)), entries(10))
    made.pull_kv(piece("b", 1, (0, 3), (0, 1)), entries(20))
    made.pull_layers(LayerPull(LayerRange(0, 1), ONE))
    made.next_ask(0.0)
    made.next_ask(0.0)
    made.expire(9.9)
    assert made.drain() == []
    made.expire(10.5)
    assert [d.refusal for d in made.drain()] == ["the source was silent for 10 s"]
    made.lose(ONE)
    assert [d.refusal for d in made.drain()] == ["the source is gone"] * 2
    assert made.num_pulls == 0
    made.check()


def test_a_silent_source_holds_up_its_own_pulls_only() -> None:
    """Hundreds of its pulls come first; those of the other source are done as if it were alone."""
    made, _ = sink()
    for number in range(100):
        made.pull_kv(piece(f"a{number}", 0, (0, 3), (0, 1)), entries(10))
    for number in range(5):
        made.pull_kv(piece(f"b{number}", 1, (0, 1), (0, 1)), entries(20))
    assert [made.next_ask(0.0) is not None for _ in range(3)] == [True, True, False]
    assert made.wait_s(0.0) == pytest.approx(PACING.stall_s), "then the slots are another's"
    now_s = PACING.stall_s
    for _ in range(5):
        ask = made.next_ask(now_s)
        made.check()
        assert ask is not None and ask[0] == ONE
        made.on_reply(ask[1].ticket, Answer.DATA, some_bytes(UNIT_BYTES), now_s)
    assert made.next_ask(now_s) is None, "the silent source is asked for no more"
    assert [d.ok for d in made.drain()] == [True] * 5
    made.on_reply(0, Answer.DATA, some_bytes(2 * UNIT_BYTES), now_s)
    assert made.next_ask(now_s) is None, "it still owes one"
    made.on_reply(1, Answer.DATA, some_bytes(UNIT_BYTES), now_s)
    assert [made.next_ask(now_s) is not None for _ in range(3)] == [True, True, False]
    made.expire(now_s + PACING.chunk_timeout_s + 0.1)
    ended = made.drain()
    assert [d.ok for d in ended] == [True] + [False] * 99, "all of it at once"
    assert made.num_pulls == 0 and made.wait_s(99.0) is None


def test_cancelling_writes_and_says_nothing() -> None:
    made, memory = sink()
    made.pull_kv(piece("a", 0, (0, 3), (0, 1)), entries(10))
    made.pull_kv(piece("a", 1, (3, 6), (0, 1)), entries(10))
    made.pull_kv(piece("b", 1, (0, 1), (0, 1)), entries(20))
    made.pull_layers(LayerPull(LayerRange(0, 1), ONE))
    made.next_ask(0.0)
    made.cancel(RequestId("a"))
    made.on_reply(0, Answer.DATA, some_bytes(2 * UNIT_BYTES), 0.0)
    assert made.drain() == [] and not memory.kv.any() and made.num_pulls == 2
    ask = made.next_ask(0.0)
    assert ask is not None
    made.clear()
    made.on_reply(ask[1].ticket, Answer.DATA, some_bytes(UNIT_BYTES), 0.0)
    assert made.drain() == [] and not memory.kv.any() and made.num_pulls == 0
    made.check()


def test_weights_that_are_called_off_are_not_written_late() -> None:
    """One pull has ended untold, one is half there, one waits; KV goes on."""
    made, memory = sink(BulkPacing(chunk_bytes=LAYER_BYTES, max_in_flight=3))
    for layer in range(2):
        made.pull_layers(LayerPull(LayerRange(layer, layer + 1), ONE))
    made.pull_layers(LayerPull(LayerRange(2, 4), ONE))
    kept = piece("a", 0, (0, 3), (0, 1))
    made.pull_kv(kept, entries(10))
    for ticket in range(3):
        assert made.next_ask(0.0) is not None
        if ticket in (0, 2):
            made.on_reply(ticket, Answer.DATA, some_bytes(LAYER_BYTES), 0.0)
    assert made.next_ask(0.0) is not None and made.num_bytes == 2 * LAYER_BYTES
    made.cancel(None)
    assert made.num_pulls == 1
    made.check()
    memory.weights[:] = 0  # it is other memory now
    for ticket in (1, 3):
        made.on_reply(ticket, Answer.DATA, some_bytes(LAYER_BYTES), 0.0)
    assert not memory.weights.any() and made.num_bytes == 2 * LAYER_BYTES
    ask = made.next_ask(0.0)
    assert ask is not None
    made.on_reply(ask[1].ticket, Answer.DATA, some_bytes(3 * UNIT_BYTES), 0.0)
    assert [done.what for done in made.drain()] == [kept] and made.num_pulls == 0


def test_a_piece_names_one_entry_per_block() -> None:
    made, _ = sink()
    with pytest.raises(AssertionError):
        made.pull_kv(piece("a", 0, (0, 3), (0, 2)), entries(10))
