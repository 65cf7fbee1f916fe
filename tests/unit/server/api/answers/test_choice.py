"""One output: order, ends, and text that does not depend on how tokens arrive."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from kunserve.server.api.answers.choice import Choice, TextOptions
from kunserve.server.api.answers.detokenize import ByteDetokenizer, TokenBytes
from kunserve.server.api.answers.stop import StopStrings
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

BACKEND = tiny_tokenizer().backend_tokenizer
TOKEN_BYTES = TokenBytes(BACKEND)
LOGPROBS = TokenLogprobs(-1.0, 1, ())


def choice(options: TextOptions | None = None, **sampling: int) -> Choice:
    request = Request(RequestId("r"), (1,), SamplingParams(50, **sampling), 0.0)
    options = options or TextOptions()
    detokenizer = ByteDetokenizer(TOKEN_BYTES, True)
    return Choice(0, request, detokenizer, options, options.new_matcher())


def output(position: int, token_id: int | None, reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(RequestId("r"), position, token_id, LOGPROBS, reason)


def tokens(text: str) -> list[int]:
    return list(BACKEND.encode(text).ids)


def test_nothing_after_the_end() -> None:
    one = choice()
    one.absorb(output(0, tokens("a")[0], FinishReason.LENGTH))
    one.absorb(output(1, tokens("b")[0]))
    assert one.drain().text == "a" and one.num_tokens == 1


def test_an_end_without_a_token() -> None:
    one = choice()
    one.absorb(output(0, tokens("a")[0]))
    one.absorb(output(1, None, FinishReason.ABORT))
    assert one.finish_reason is FinishReason.ABORT and one.drain().text == "a"


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=3), max_size=2))
def test_what_is_taken_piecewise_is_the_whole(text: str, stops: list[str]) -> None:
    ids = tokens(text + ".")
    options = TextOptions(StopStrings(stops) if stops else None)
    taken, at_once = choice(options), choice(options)
    pieces, offsets = [], []
    for position, token_id in enumerate(ids):
        reason = FinishReason.LENGTH if position + 1 == len(ids) else None
        for one in (taken, at_once):
            one.absorb(output(position, token_id, reason))
        delta = taken.drain()
        pieces.append(delta.text)
        offsets += [entry.text_offset for entry in delta.entries]
    whole = at_once.drain()
    assert "".join(pieces) == whole.text
    assert taken.finish_reason == at_once.finish_reason
    assert offsets == [entry.text_offset for entry in whole.entries] == sorted(offsets)
    assert not any(stop in whole.text for stop in stops)
    if taken.finish_reason is FinishReason.LENGTH:
        assert whole.text == text + "."


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = tokens("b") * 4
    one = choice(TextOptions(StopStrings(["b"])), min_tokens=2)
    for position, token_id in enumerate(ids):
        one.absorb(output(position, token_id))
    assert one.drain().text == "bb" and one.ended_by_text and one.num_tokens == 3
