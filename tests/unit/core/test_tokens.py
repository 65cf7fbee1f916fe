"""Token ids in four bytes each."""

import pytest

from kunserve.core.ids import RequestId
from kunserve.core.messages import Submit
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve.transport.wire.codec import MalformedMessage, decode, encode


def test_they_read_like_a_tuple() -> None:
    ids = TokenIds(range(5))
    assert ids == (0, 1, 2, 3, 4) == tuple(ids) and hash(ids) == hash((0, 1, 2, 3, 4))
    assert len(ids) == 5 and ids[-1] == 4 and ids[1:3] == (1, 2) and 3 in ids
    assert ids != TokenIds((0, 1)) and ids != [0, 1, 2, 3, 4]
    assert TokenIds(ids) == ids and not TokenIds()
    assert TokenIds(b"ab") == (97, 98)


def test_a_prompt_takes_four_bytes_a_token_in_a_message() -> None:
    ids = TokenIds(range(100_000, 102_000))
    message = Submit(Request(RequestId("r"), ids, SamplingParams(1), 0.0))
    data = encode(message)
    assert decode(data) == message
    assert len(data) < 4 * len(ids) + 500


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds((2**31,))
    with pytest.raises(ValueError, match="bytes length not a multiple"):
        TokenIds.from_bytes(b"12345")
    message = Submit(Request(RequestId("r"), TokenIds((258,)), SamplingParams(1), 0.0))
    data = bytes(encode(message)).replace(b"\xc4\x04\x02\x01\x00\x00", b"\xc4\x03\x02\x01\x00")
    with pytest.raises(MalformedMessage):
        decode(data)
