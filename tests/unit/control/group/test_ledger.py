"""Block counts of a group."""

from kunserve.control.group.ledger import Ledger
from kunserve.core.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def test_grow_and_release() -> None:
    ledger = Ledger(10)
    assert not ledger.grow(A, 11) and ledger.free_blocks == 10
    assert ledger.grow(A, 4) and ledger.blocks_of(A) == 4
    assert ledger.grow(A, 2) and ledger.blocks_of(A) == 4, "never shrinks by growing"
    assert not ledger.grow(B, 7) and ledger.blocks_of(B) == 0
    assert ledger.grow(B, 6) and ledger.free_blocks == 0
    assert ledger.release(A) == 4 and ledger.release(A) == 0
    assert (ledger.used_blocks, ledger.free_blocks) == (6, 4)
    ledger.check()


def test_capacity_may_fall_below_what_is_used() -> None:
    ledger = Ledger(10)
    assert ledger.grow(A, 8)
    ledger.capacity_blocks = 5
    assert ledger.free_blocks == 0 and ledger.used_blocks == 8
    assert ledger.grow(A, 8), "no growth is no shortage"
    assert not ledger.grow(A, 9) and not ledger.grow(B, 1)
    ledger.hold(B, 3)
    assert ledger.used_blocks == 11
    ledger.release(A)
    assert ledger.grow(B, 5) and not ledger.grow(B, 6)
    ledger.check()
