"""Incremental text equals whole text, and no character is ever cut."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kunserve.server.api.answers.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    MarkKeeper,
    TokenBytes,
    WindowDetokenizer,
)
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer().backend_tokenizer
NUM_TOKENS = BYTE_LEVEL.get_vocab_size()
TOKEN_BYTES = TokenBytes(BYTE_LEVEL)


def sentencepiece_like() -> Tokenizer:
    """Pieces with a space mark, and a byte token for everything else, as Llama 2 has."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ["▁", "▁the", "▁fox", "e", "s", "é"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def run(detokenizer: Detokenizer, token_ids: list[int]) -> tuple[list[str], str]:
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return pieces, detokenizer.finish()


@given(st.text(max_size=60))
def test_text_survives_byte_by_byte(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text).ids
    pieces, rest = run(ByteDetokenizer(TOKEN_BYTES, True), token_ids)
    assert "".join(pieces) + rest == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40), st.booleans())
def test_any_tokens_equal_the_library(token_ids: list[int], skip: bool) -> None:
    pieces, rest = run(ByteDetokenizer(TOKEN_BYTES, skip), token_ids)
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == expected


def test_an_incomplete_character_is_shown_at_the_end_only() -> None:
    token_ids = BYTE_LEVEL.encode("é").ids[:1]
    detokenizer = ByteDetokenizer(TOKEN_BYTES, True)
    assert detokenizer.push(token_ids[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    # The model's output head may be padded beyond the tokenizer's vocabulary.
    assert run(ByteDetokenizer(TOKEN_BYTES, True), [NUM_TOKENS + 7]) == ([""], "")


@given(st.lists(st.sampled_from(["▁the", "▁fox", "e", "s", "é"]), min_size=1, max_size=30))
def test_window_equals_the_library_for_other_decoders(words: list[str]) -> None:
    tokenizer = sentencepiece_like()
    assert not TokenBytes(tokenizer).byte_level
    prompt = [tokenizer.token_to_id("▁the")]
    token_ids = [tokenizer.token_to_id(word) for word in words]
    pieces, rest = run(WindowDetokenizer(tokenizer, prompt, True), token_ids)
    assert "the" + "".join(pieces) + rest == tokenizer.decode(prompt + token_ids)


@pytest.mark.parametrize("text", ["漢字", "🙂🙂", "🎉🎉🎉🎉", "é", "a\u0301", "ไทย ß 漢"])
def test_window_joins_bytes_of_a_character(text: str) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1 + byte for byte in text.encode()]
    prompt = [tokenizer.token_to_id("▁the")]
    pieces, rest = run(WindowDetokenizer(tokenizer, prompt, True), token_ids)
    assert "".join(pieces) + rest == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=30), st.text(max_size=12), st.booleans())
def test_window_shows_every_character_once(text: str, prompt: str, words: bool) -> None:
    tokenizer = sentencepiece_like()
    vocab = tokenizer.get_vocab()

    def encode(part: str) -> list[int]:
        """In bytes, or in pieces of the vocabulary where there are any."""
        ids: list[int] = []
        for character in part:
            piece = "▁" if character == " " else character
            spelled = [1 + byte for byte in character.encode()]
            ids += [vocab[piece]] if words and piece in vocab else spelled
        return ids

    the = vocab["▁the"]
    window = WindowDetokenizer(tokenizer, [the, *encode(prompt)], True)
    pieces, rest = run(window, [*encode(text), the])
    assert "".join(pieces) + rest == text + " the"


def test_window_goes_on_after_a_broken_byte() -> None:
    tokenizer = sentencepiece_like()
    broken = [1 + 0xFF, *(1 + byte for byte in "🎉é".encode())]
    pieces, rest = run(WindowDetokenizer(tokenizer, [], True), broken)
    assert "".join(pieces) + rest == "\ufffd🎉é"


def test_window_keeps_the_space_after_a_special_token() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<end>"])
    end, the = tokenizer.token_to_id("<end>"), tokenizer.token_to_id("▁the")
    pieces, rest = run(WindowDetokenizer(tokenizer, [the], True), [the, *[end] * 20, the])
    assert "".join(pieces) + rest == " the the"


def test_window_shows_broken_bytes_at_last() -> None:
    tokenizer = sentencepiece_like()
    pieces, rest = run(WindowDetokenizer(tokenizer, [], True), [1 + 0x80] * 20)
    assert "\ufffd" in "".join(pieces)
    assert set("".join(pieces) + rest) == {"\ufffd"}


def test_bytes_of_a_token() -> None:
    assert TOKEN_BYTES.of(BYTE_LEVEL.token_to_id("<|end|>")) == b"<|end|>"
    assert b"".join(TOKEN_BYTES.of(one) for one in BYTE_LEVEL.encode(" é").ids) == " é".encode()


@pytest.mark.parametrize(
    "make", [lambda: Tokenizer.from_str(BYTE_LEVEL.to_str()), sentencepiece_like]
)
@given(data=st.data())
def test_marks_that_are_special_tokens_are_kept(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    """Others are skipped, and the text around a mark is what it would be without the mark."""
    tokenizer = make()
    tokenizer.add_special_tokens(["[CALL]", "<|other|>"])
    mark, other = tokenizer.token_to_id("[CALL]"), tokenizer.token_to_id("<|other|>")
    text = st.sampled_from(tokenizer.encode("the fox sé 👍").ids)
    token_ids = data.draw(st.lists(st.one_of(text, st.sampled_from([mark, other])), max_size=20))
    token_bytes = TokenBytes(tokenizer)

    def inner() -> Detokenizer:
        if token_bytes.byte_level:
            return ByteDetokenizer(token_bytes, True)
        return WindowDetokenizer(tokenizer, [tokenizer.token_to_id("▁the")], True)

    pieces, rest = run(MarkKeeper(inner(), {mark: "[CALL]"}), token_ids)
    shown = "".join(pieces) + rest
    assert shown.count("[CALL]") == token_ids.count(mark)
    assert "other" not in shown
    if mark not in token_ids:
        pieces, rest = run(inner(), token_ids)
        assert shown == "".join(pieces) + rest
