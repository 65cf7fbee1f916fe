import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.messages import Abort, Activation, Message
from kunserve.core.step import StepPlan
from kunserve.transport.peers.links import LinkFault, PeerLinks, PeerMail
from kunserve.transport.wire import identity, sockets
from kunserve.transport.wire.codec import MalformedMessage, encode
from kunserve.transport.wire.sockets import ANY_PORT, EXPEDITED, connect_dealer
from tests.unit.transport.addresses import fresh_address

ZERO, ONE, TWO = InstanceId(0), InstanceId(1), InstanceId(2)


def activation(step: int) -> Activation:
    return Activation(StepPlan(GroupId(1), StepId(step), (), (), ()))


def abort(number: int) -> Abort:
    return Abort(RequestId(f"r{number}"))


def receive(links: PeerLinks, count: int) -> list[PeerMail]:
    mail: list[PeerMail] = []
    while len(mail) < count:
        more = links.poll(10.0)
        assert more, f"{len(mail)} of {count}"
        mail += more
    return mail


@pytest.fixture
def links() -> Iterator[list[PeerLinks]]:
    made = [PeerLinks(InstanceId(i), fresh_address()) for i in range(3)]
    addresses = {InstanceId(i): each.address for i, each in enumerate(made)}
    for each in made:
        each.connect(addresses)
    yield made
    for each in made:
        each.close()


def test_messages_and_activations_arrive_in_order(links: list[PeerLinks]) -> None:
    sent: list[Message] = []
    for number in range(100):
        hidden = np.full(number * 1000, number, dtype=np.uint16)
        sent += [activation(number), abort(number)]
        links[0].send(ONE, sent[-2], hidden.data)
        links[0].send(ONE, sent[-1])
    mail = receive(links[1], 200)
    assert [message for message, _ in mail] == sent
    for number, (_, payload) in enumerate(mail[::2]):
        assert payload is not None
        got = np.frombuffer(payload, dtype=np.uint16)
        assert len(got) == number * 1000 and (got == number).all()
    assert all(payload is None for _, payload in mail[1::2])


def test_everyone_reaches_everyone(links: list[PeerLinks]) -> None:
    for me, mine in enumerate(links):
        for peer in range(3):
            if peer != me:
                assert mine.send(InstanceId(peer), abort(me))
    for me, mine in enumerate(links):
        got = {message.request_id for message, _ in receive(mine, 2) if isinstance(message, Abort)}
        assert got == {f"r{peer}" for peer in range(3) if peer != me}


def test_an_activation_is_pending_until_it_has_left(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    nowhere = PeerLinks(ZERO, fresh_address())
    nowhere.connect({ONE: fresh_address()})
    assert not nowhere.activations_pending()
    nowhere.send(ONE, activation(0), memoryview(bytes(1000)))
    assert not nowhere.activations_pending(), "small ones are copied"
    nowhere.send(ONE, activation(1), memoryview(bytes(1_000_000)))
    assert nowhere.activations_pending()
    nowhere.connect({})
    eventually(lambda: not nowhere.activations_pending())
    nowhere.close()

    links[0].send(ONE, activation(2), memoryview(bytes(1_000_000)))
    receive(links[1], 1)
    eventually(lambda: not links[0].activations_pending())


def test_no_such_peer(links: list[PeerLinks]) -> None:
    assert not links[0].send(InstanceId(9), abort(0))
    assert not links[0].send(ZERO, abort(0)), "an instance has no link to itself"


def test_a_restarted_peer_has_a_new_address(links: list[PeerLinks]) -> None:
    links[0].send(ONE, abort(0))
    receive(links[1], 1)
    successor = PeerLinks(ONE, fresh_address())
    links[0].connect({ONE: successor.address})
    links[0].send(ONE, abort(1))
    assert receive(successor, 1) == [PeerMail(abort(1), None)]
    assert not links[0].send(TWO, abort(2)), "connect names all peers"
    successor.close()


def test_leaving_and_coming_back(links: list[PeerLinks]) -> None:
    links[0].send(ONE, abort(0))
    receive(links[1], 1)
    for number in range(1, 6):
        links[0].connect({})
        links[0].connect({ONE: links[1].address})
        links[0].send(ONE, abort(number))
        assert receive(links[1], 1) == [PeerMail(abort(number), None)]


def test_strangers_and_nonsense(links: list[PeerLinks], caplog: pytest.LogCaptureFixture) -> None:
    stranger = connect_dealer(links[0].address, b"somebody")
    for number in range(100):
        stranger.send(encode(abort(number)))
    with caplog.at_level(logging.WARNING):
        while links[0].rejections.num < 100:
            assert links[0].poll(10.0) == []
    assert caplog.text.count("rejected messages of strangers wire=peers") == 1, "not one by one"
    me = identity.Identity(b"p", TWO, identity.new_incarnation())
    liar = connect_dealer(links[0].address, identity.pack(me))
    for frames in ([b"\xff"], [b"1", b"2", b"3"]):
        liar.send_multipart(frames)
        with pytest.raises(MalformedMessage):
            links[0].poll(10.0)
    liar.close()
    stranger.close()


def test_a_queue_that_nobody_reads_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "MAX_QUEUED", 5)
    links = PeerLinks(ZERO, fresh_address())
    links.connect({ONE: fresh_address()})
    payload = memoryview(bytes(20))
    told = [links.send(ONE, activation(number), payload) for number in range(9)]
    assert told == [True] * 5 + [False] * 4
    assert "queue full, message dropped instance=1" in caplog.text
    links.close()


def test_a_frame_of_any_size_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 100_000)
    taker, giver = (PeerLinks(InstanceId(i), fresh_address()) for i in range(2))
    giver.connect({ZERO: taker.address})
    giver.send(ZERO, activation(0), memoryview(bytes(99_000)))
    assert len(receive(taker, 1)) == 1
    giver.send(ZERO, activation(1), memoryview(bytes(101_000)))
    # The connection ends; the next one brings the next message.
    giver.connect({})
    giver.connect({ZERO: taker.address})
    giver.send(ZERO, activation(2), memoryview(bytes(10)))
    assert [mail.message for mail in receive(taker, 1)] == [activation(2)]
    for end in (taker, giver):
        end.close()


def test_links_are_marked_for_the_network() -> None:
    links = PeerLinks(ZERO, ANY_PORT)
    (inbox,) = links.poll_sockets
    assert not isinstance(inbox, int)
    assert inbox.getsockopt(zmq.TOS) == EXPEDITED
    links.close()


def test_what_is_missing_doubled_or_overtaken_is_a_fault(links: list[PeerLinks]) -> None:
    """Told once; nothing more is read until the sender begins anew."""
    for harm in ("lost", "doubled"):
        links[0].send(ONE, abort(0))
        receive(links[1], 1)
        if harm == "lost":
            links[0]._outgoing.next(ONE)
        else:
            due = links[0]._outgoing._due
            due[ONE] = due[ONE]._replace(number=due[ONE].number - 1)
        for number in range(3):
            links[0].send(ONE, abort(number))
        links[2].send(ONE, abort(9))
        faults: list[LinkFault] = []
        mail: list[PeerMail] = []
        while not (mail and faults):
            mail += links[1].poll(10.0)
            faults += links[1].faults()
        assert [message.message for message in mail] == [abort(9)], "other links go on"
        assert [fault.peer for fault in faults] == [ZERO]
        links[0].begin_anew()
        links[0].send(ONE, abort(5))
        assert receive(links[1], 1) == [PeerMail(abort(5), None)]
        assert links[1].faults() == []


def test_the_last_message_of_all_is_missed(links: list[PeerLinks]) -> None:
    links[0].send(ONE, abort(0))
    receive(links[1], 1)
    links[0].tell_counts()
    links[0]._outgoing.next(ONE)  # lost, and nothing follows
    links[0].tell_counts()
    while not (faults := links[1].faults()):
        assert links[1].poll(10.0) == []
    assert faults == [LinkFault(ZERO, "message 2 has come, but 1 was due")]
