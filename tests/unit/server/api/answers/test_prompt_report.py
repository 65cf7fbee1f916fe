"""What an answer tells of its prompt's tokens: its form, and what it costs to write."""

import tracemalloc

import msgspec

from kunserve.core.ids import RequestId
from kunserve.core.prompt_scores import pack_scores
from kunserve.core.request import TokenLogprobs
from kunserve.server.api.answers.prompt_report import PromptReport
from kunserve.server.api.text import TextCodec
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

NUM_TOP = 20


def report(num_tokens: int) -> PromptReport:
    codec = TextCodec(tiny_tokenizer(), num_tokens, 1000, 1000)
    num_numbers = num_tokens * (1 + NUM_TOP)
    return PromptReport(codec, [[5] * num_tokens], [""], 1, False, NUM_TOP, num_numbers)


def row() -> TokenLogprobs:
    return TokenLogprobs(-1.5, 3, tuple((token_id, -1.25) for token_id in range(NUM_TOP)))


def test_a_long_listing_needs_little_more_memory_than_its_text() -> None:
    num_tokens = 400
    scores = [pack_scores(RequestId("r"), 0, NUM_TOP, [row()] * (num_tokens - 1))]
    asked = report(num_tokens)
    asked.listing(0, scores)  # the token's names are known from now on
    tracemalloc.start()
    try:
        written = msgspec.json.encode(asked.listing(0, scores))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 5 * len(written), (most_bytes, len(written))
    first, second, *others = msgspec.json.decode(written)
    assert first is None and len(others) == num_tokens - 2
    assert second["5"] == {
        "logprob": -1.5,
        "rank": 3,
        "decoded_token": second["5"]["decoded_token"],
    }
    assert len(second) == NUM_TOP
