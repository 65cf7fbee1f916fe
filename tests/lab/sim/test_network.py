"""Links: bandwidth is shared, bytes are conserved, activations go first if they may."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import InstanceId
from kunserve.core.place import Place
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.network import BULK_CHUNK_BYTES, Network

A, B, C = InstanceId(0), InstanceId(1), InstanceId(2)
RATE = 1e9


def world(*, priority: bool = True) -> tuple[EventHeap, Network, dict[str, float]]:
    heap = EventHeap()
    return heap, Network(heap, RATE, 1e-4, priority=priority), {}


def drain(heap: EventHeap) -> None:
    while heap.step():
        pass


def test_a_card_is_shared_and_directions_are_not() -> None:
    heap, network, ends = world()
    for name, src, dst in (("ab", A, B), ("ac", A, C), ("ba", B, A)):
        network.send_bulk(src, dst, RATE, lambda n=name: ends.__setitem__(n, heap.now_s()))
    drain(heap)
    assert ends == {"ab": 1.0, "ba": 1.0, "ac": 2.0}
    assert network.bulk_bytes == 3 * RATE


def test_hosts_share_their_cards_and_memory_is_apart() -> None:
    """A and B on one host, C and D on another: what crosses takes turns on the hosts' link."""
    heap, ends = EventHeap(), dict[str, float]()
    places = {A: Place("x", "", 0.8), B: Place("x", "", 0.8), C: Place("y", "", 0.8)}
    network = Network(heap, RATE, 1e-4, place_of=lambda i: places.get(i, places[C]))
    for name, src, dst in (("ab", A, B), ("ac", A, C), ("bd", B, InstanceId(3)), ("ca", C, A)):
        network.send_bulk(src, dst, 1e8, lambda n=name: ends.__setitem__(n, heap.now_s()))
    drain(heap)
    assert ends == {"ab": 0.1, "ac": 1.0, "bd": 2.0, "ca": 1.0}


def test_an_activation_passes_bulk_and_takes_its_time_from_it() -> None:
    heap, network, ends = world()
    network.send_bulk(A, B, RATE, lambda: ends.__setitem__("bulk", heap.now_s()))
    heap.at(0.5, network.send_activation, A, B, RATE / 10,
            lambda: ends.__setitem__("activation", heap.now_s()))  # fmt: skip
    drain(heap)
    assert 0.6 < ends["activation"] < 0.6 + 2e-4 + BULK_CHUNK_BYTES / RATE
    assert abs(ends["bulk"] - 1.1) < 1e-9


def test_without_priority_it_waits_its_turn() -> None:
    heap, network, ends = world(priority=False)
    network.send_bulk(A, B, RATE, lambda: None)
    heap.at(0.5, network.send_activation, A, B, RATE / 10,
            lambda: ends.__setitem__("activation", heap.now_s()))  # fmt: skip
    drain(heap)
    assert abs(ends["activation"] - 1.1001) < 1e-9


def test_nothing_to_send_costs_nothing() -> None:
    heap, network, ends = world()
    network.send_bulk(A, B, RATE, lambda: ends.__setitem__("end", heap.now_s()), lambda: False)
    drain(heap)
    assert ends == {"end": 0.0} and network.bulk_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 3), st.integers(0, 50), st.floats(0, 2), st.booleans()
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_bytes_are_conserved_and_no_card_exceeds_its_rate(
    sends: list[tuple[int, int, int, float, bool]], priority: bool
) -> None:
    heap, network, _ = world(priority=priority)
    arrived: list[float] = []
    bulk = urgent = 0.0
    for src, dst, tenths, at_s, is_urgent in sends:
        if src == dst:
            continue
        num_bytes = tenths * RATE / 10
        send = network.send_activation if is_urgent else network.send_bulk
        ends = InstanceId(src), InstanceId(dst)
        heap.at(at_s, send, *ends, num_bytes, lambda: arrived.append(heap.now_s()))
        urgent += num_bytes * is_urgent
        bulk += num_bytes * (not is_urgent)
    drain(heap)
    assert len(arrived) == sum(src != dst for src, dst, *_ in sends)
    assert abs(network.activation_bytes - urgent) < 1 and abs(network.bulk_bytes - bulk) < 1
    for card in range(4):
        for side in (0, 1):
            through = sum(s[2] * RATE / 10 for s in sends if s[side] == card and s[0] != s[1])
            assert not through or max(arrived) >= through / RATE - 1e-6
