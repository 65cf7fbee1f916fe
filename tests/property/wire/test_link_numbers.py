"""Numbers of a link: what is lost, doubled or overtaken is noticed, and an epoch heals it."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import InstanceId
from kunserve.transport.wire.numbering import Incoming, Outgoing, Stamp, read_stamp

PEER = InstanceId(1)
HARMS = ("lose", "double", "overtake")


@given(
    num_before=st.integers(0, 10),
    num_after=st.integers(2, 10),
    harm=st.sampled_from(HARMS),
    num_epochs=st.integers(1, 3),
)
def test_the_first_word_out_of_order_is_told_once_and_none_after_it_is_read(
    num_before: int, num_after: int, harm: str, num_epochs: int
) -> None:
    outgoing, incoming = Outgoing(), Incoming()
    for _ in range(num_epochs):
        before = [outgoing.next(PEER) for _ in range(num_before)]
        after = [outgoing.next(PEER) for _ in range(num_after)]
        assert [incoming.take(b"a", stamp) for stamp in before] == [None] * num_before
        match harm:
            case "lose":
                after = after[1:]
            case "double":
                after.insert(1, after[0])
            case "overtake":
                after[:2] = after[1::-1]
        verdicts = [incoming.take(b"a", stamp) for stamp in after]
        faults = [verdict for verdict in verdicts if verdict]
        assert len(faults) == 1, (after, verdicts)
        first = verdicts.index(faults[0])
        assert verdicts == [None] * first + faults + [""] * (len(after) - first - 1)
        assert first == (1 if harm == "double" else 0)
        outgoing.begin_anew()


@given(st.lists(st.sampled_from(["a", "b", "again"]), max_size=30))
def test_links_do_not_disturb_each_other(words: list[str]) -> None:
    """Two processes' words in any order, each beginning anew now and then."""
    ends = {name: Outgoing() for name in "ab"}
    incoming = Incoming()
    for word in words:
        if word == "again":
            ends["a"].begin_anew(PEER)
            continue
        stamp = read_stamp(ends[word].next(PEER).to_bytes())
        assert incoming.take(word.encode(), stamp) is None


def test_an_old_epoch_does_not_come_back() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    old = outgoing.next(PEER)
    outgoing.begin_anew()
    assert incoming.take(b"a", outgoing.next(PEER)) is None
    assert incoming.take(b"a", old)


def test_the_last_word_of_all_is_missed_by_the_count() -> None:
    outgoing, incoming = Outgoing(), Incoming()
    assert outgoing.count(PEER) is None
    assert incoming.take(b"a", outgoing.next(PEER)) is None
    count = outgoing.count(PEER)
    assert count is not None and incoming.compare(b"a", count) is None
    assert incoming.take(b"a", outgoing.next(PEER)) is None
    outgoing.next(PEER)
    count = outgoing.count(PEER)
    assert count is not None
    assert incoming.compare(b"a", count) == "message 3 has come, but 2 was due"
    assert incoming.compare(b"a", count) == ""


def test_a_word_lost_at_the_beginning_is_missed() -> None:
    outgoing = Outgoing()
    outgoing.next(PEER)
    assert Incoming().take(b"a", outgoing.next(PEER)) == "message 1 has come, but 0 was due"


def test_what_comes_on_the_second_way_waits_for_all_before_it() -> None:
    incoming, sender = Incoming(), b"one"
    assert incoming.when_beside(sender, Stamp(2, 0)) == "later", "the first comes on the first way"
    assert incoming.take(sender, Stamp(2, 0)) is None
    assert incoming.when_beside(sender, Stamp(2, 1)) == "now"
    assert incoming.when_beside(sender, Stamp(2, 2)) == "later"
    assert incoming.when_beside(sender, Stamp(3, 0)) == "later"
    assert incoming.when_beside(sender, Stamp(1, 9)) == "never"
