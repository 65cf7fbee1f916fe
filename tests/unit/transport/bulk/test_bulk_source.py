import numpy as np
import pytest

from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.transport.bulk import source as bulk_source
from kunserve.transport.bulk.source import BulkSource
from kunserve.transport.bulk.wire import Answer, KvChunk, LayerChunk
from tests.unit.transport.bulk_world import LAYER_BYTES, UNIT_BYTES, Memory, entries

R = RequestId("r")


def kv(
    request: str = "r",
    layers: tuple[int, int] = (2, 5),
    blocks: tuple[int, int] = (0, 3),
    units: tuple[int, int] = (0, 9),
    transition: int = 1,
) -> KvChunk:
    first, end = units
    return KvChunk(7, transition, request, layers, blocks, first, end - first)


def source() -> tuple[BulkSource, Memory]:
    memory = Memory(60, seed=1)
    made = BulkSource(memory)
    made.export(R, entries(-2, 30, 12))
    return made, memory


def test_a_block_over_layers_is_one_run() -> None:
    made, memory = source()
    answer, data = made.serve(kv())
    assert answer is Answer.DATA and data is not None
    layers = LayerRange(2, 5)
    want = np.concatenate([memory.block(e, layers) for e in (-2, 30, 12)])
    np.testing.assert_array_equal(data, want)
    _, part = made.serve(kv(units=(2, 7)))
    assert part is not None
    np.testing.assert_array_equal(part, want[2 * UNIT_BYTES : 7 * UNIT_BYTES])
    _, later = made.serve(kv(blocks=(1, 3), units=(0, 6)))
    assert later is not None
    np.testing.assert_array_equal(later, want[3 * UNIT_BYTES :])


def test_what_is_given_does_not_change_with_the_memory() -> None:
    made, memory = source()
    _, data = made.serve(kv(blocks=(1, 2), units=(0, 3)))
    assert data is not None
    before = data.copy()
    memory.kv[:] = 0
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize(
    "chunk",
    [
        kv(blocks=(0, 4), units=(0, 12)),
        kv(blocks=(2, 2), units=(0, 1)),
        kv(units=(0, 10)),
        kv(units=(5, 5)),
        kv(units=(-1, 3)),
    ],
    ids=["blocks beyond", "no blocks", "units beyond", "no units", "before the first"],
)
def test_ranges_outside_are_refused(chunk: KvChunk) -> None:
    assert source()[0].serve(chunk) == (Answer.REFUSED, None)


def test_unknown_is_not_yet_and_withdrawn_is_never() -> None:
    made, _ = source()
    assert made.serve(kv("late")) == (Answer.NOT_YET, None)
    made.export(RequestId("late"), entries(0, 0, 0))
    assert made.serve(kv("late"))[0] is Answer.DATA
    made.withdraw(R)
    made.withdraw(R)
    made.withdraw(RequestId("never seen"))
    assert made.serve(kv()) == (Answer.REFUSED, None)
    assert made.serve(kv("never seen")) == (Answer.NOT_YET, None)


def test_a_withdrawal_holds_for_its_transition_only() -> None:
    made, _ = source()
    made.saw_transition(4)
    made.withdraw(R)
    assert made.serve(kv(transition=4))[0] is Answer.REFUSED
    assert made.serve(kv(transition=5))[0] is Answer.NOT_YET, "the peer is ahead of us"
    made.export(R, entries(1, 2, 3))
    assert made.serve(kv(transition=5))[0] is Answer.DATA


def test_withdrawing_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_source, "MAX_WITHDRAWN", 2)
    made, _ = source()
    for name in ("s", "t"):
        made.export(RequestId(name), entries(0, 0, 0))
    made.saw_transition(1)
    made.withdraw_all()
    answers = [made.serve(kv(name))[0] for name in ("r", "s", "t")]
    assert answers == [Answer.NOT_YET, Answer.REFUSED, Answer.REFUSED], "the oldest is forgotten"


def test_layers_only_when_offered() -> None:
    made, memory = source()
    chunk = LayerChunk(1, 3, 100, 50)
    assert made.serve(chunk) == (Answer.REFUSED, None)
    made.offer(LayerRange(3, 5))
    answer, data = made.serve(chunk)
    assert answer is Answer.DATA and data is not None
    np.testing.assert_array_equal(data, memory.layer_view(3)[100:150])
    assert made.serve(LayerChunk(1, 5, 0, 10))[0] is Answer.REFUSED
    for offset, num in ((LAYER_BYTES, 1), (-1, 5), (0, 0), (900, 101)):
        assert made.serve(LayerChunk(1, 3, offset, num))[0] is Answer.REFUSED
