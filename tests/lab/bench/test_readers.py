"""What a reader sees of an answer."""

import pytest

from kunserve_lab.bench.readers import lateness_s, reader_stats, stall_s
from kunserve_lab.bench.records import RequestRecord


def record(*times_s: float, tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        number=0,
        server="s",
        planned_s=0.0,
        sent_s=0.0,
        token_times_s=times_s,
        last_token_s=times_s[-1] if times_s else None,
        finish_s=times_s[-1] if times_s else 0.0,
        input_tokens=1,
        asked_output_tokens=len(times_s),
        output_tokens=len(times_s) if tokens is None else tokens,
        finish_reason="length",
        error=None,
    )


def test_a_pause_is_seen_only_by_who_has_read_all() -> None:
    ahead = record(1.0, 1.1, 1.2, 1.3, 2.2)
    assert stall_s(ahead, 2.0) == 0.0, "four tokens are read in two seconds"
    assert stall_s(ahead, 4.0) == pytest.approx(0.2)


def test_who_has_waited_goes_on_from_there() -> None:
    """Half a second for the second token, another half for the fourth."""
    assert stall_s(record(0.0, 1.5, 2.5, 4.0), 1.0) == pytest.approx(1.0)


def test_tokens_of_a_chunk_are_read_one_after_the_other() -> None:
    assert stall_s(record(0.0, 2.0, tokens=4), 1.0) == 0.0
    assert lateness_s(record(), 1.0).tolist() == []


def test_statistics_are_over_requests_and_over_tokens() -> None:
    good, late = record(0.0, 0.1, 0.2, 0.3), record(0.0, 1.0, 3.0, 3.1)
    stats = reader_stats([good, late], 1.0)
    assert stats.stall_p50_s == pytest.approx(0.5) and stats.stall_p99_s == pytest.approx(0.99)
    assert stats.late_share == pytest.approx(2 / 8)
    assert reader_stats([], 1.0).stall_p99_s == 0.0
