import pytest

from kunserve.transport.bulk.pacing import KIB, BulkPacing, TokenBucket, chunk_bytes_for


def test_no_rate_no_delay() -> None:
    bucket = TokenBucket(None, credit_s=0.0)
    bucket.take(1 << 40, 5.0)
    assert bucket.delay_s(5.0) == 0.0


def test_bytes_occupy_the_link() -> None:
    bucket = TokenBucket(0.008, credit_s=0.0)  # 1 MB/s
    assert bucket.delay_s(100.0) == 0.0
    bucket.take(500_000, 100.0)
    assert bucket.delay_s(100.0) == pytest.approx(0.5)
    assert bucket.delay_s(100.4) == pytest.approx(0.1)
    assert bucket.delay_s(100.6) == 0.0


def test_late_timers_do_not_lower_the_average_and_idling_earns_little() -> None:
    bucket = TokenBucket(0.008, credit_s=0.01)
    now_s, given = 10.0, 0
    while now_s < 20.0:
        bucket.take(5_000, now_s)
        given += 5_000
        now_s += bucket.delay_s(now_s) + 0.001
    assert given == pytest.approx(10_000_000, rel=0.02)
    bucket.take(5_000, 1000.0)
    assert bucket.delay_s(1000.0) == 0.0
    bucket.take(5_000, 1000.0)
    bucket.take(5_000, 1000.0)
    assert bucket.delay_s(1000.0) > 0.0


def test_a_chunk_is_about_one_stage_time_on_the_link() -> None:
    assert chunk_bytes_for(1.0, 0.002) == 250_000
    assert chunk_bytes_for(0.01, 0.002) == 64 * KIB
    assert chunk_bytes_for(100.0, 0.02) == 1024 * KIB
    assert BulkPacing.for_link(None) == BulkPacing(chunk_bytes=1024 * 1024, max_in_flight=4)
    for known, of_network in ((1.0, 1.0), (10.0, 10.0), (None, 1.0)):
        pacing = BulkPacing.for_link(known, is_network=True)
        in_flight_s = pacing.max_in_flight * pacing.chunk_bytes * 8 / (of_network * 1e9)
        assert in_flight_s <= 0.002, "an activation waits for no more between hosts"
        assert known is None or pacing.credit_s <= 0.001
    assert BulkPacing.for_link(1.0) == BulkPacing(chunk_bytes=250_000, link_gbps=1.0)


@pytest.mark.parametrize("bad", [{"chunk_bytes": 0}, {"max_in_flight": 0}, {"link_gbps": 0.0}])
def test_impossible_paces(bad: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        BulkPacing(**bad)  # type: ignore[arg-type]
