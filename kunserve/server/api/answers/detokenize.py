"""Token ids to text, one token at a time, never cutting a character in two."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one request's output tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 for itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + rank), byte) for rank, byte in enumerate(others))
    return alphabet


class TokenBytes:
    """The bytes that each token stands for; computed once per token, on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._known: dict[int, bytes] = {}
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        """Whether a token's bytes do not depend on its neighbours."""
        self.special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    def of(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens included."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._lookup(token_id)
        return known

    def _lookup(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # ids between the vocabulary and the padded output head
            return b""
        if not self.byte_level:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        if all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        return token.encode()


class ByteDetokenizer:
    """For byte-level vocabularies: bytes through an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_skipped", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skipped = token_bytes.special if skip_special_tokens else frozenset[int]()

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes.of(token_id))

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._decoder.decode(b"", final=True)


class MarkKeeper:
    """Around a detokenizer that skips special tokens: some of them are text after all."""

    __slots__ = ("_inner", "_kept")

    def __init__(self, inner: Detokenizer, kept: Mapping[int, str]) -> None:
        self._inner = inner
        self._kept = kept

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        mark = self._kept.get(token_id)
        if mark is None:
            return self._inner.push(token_id)
        return self._inner.finish() + mark

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._inner.finish()


class WindowDetokenizer:
    """For every other vocabulary: decode a short window with and without the new tokens.

    The window starts with tokens whose text is shown already, because such decoders treat the
    very first token of a text differently (they strip its space). It is cut only where shown
    text ends: a character that is spelled in bytes makes all bytes around it unreadable when a
    part of it is missing.
    """

    _CONTEXT = 6
    """Tokens of the prompt in the first window."""
    _LONGEST_CHARACTER = 4
    """Tokens of a character that is spelled in bytes."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = self._readable_tail(prompt_token_ids)
        self._shown = self._decode(self._context)
        self._pending: list[int] = []
        """Tokens whose text is not shown yet."""

    def _readable_tail(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, none of which is a part of a character only."""
        for length in range(self._CONTEXT, self._CONTEXT + self._LONGEST_CHARACTER):
            tail = list(token_ids[-length:])
            if REPLACEMENT not in self._decode(tail):
                return tail
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        self._pending.append(token_id)
        text = self._new_text()
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._pending), text)
        if len(self._pending) < self._LONGEST_CHARACTER:
            return ""
        # The first byte begins no character; those behind it may.
        return self._advance(1, self._decode(self._pending[:1]))

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._advance(len(self._pending), self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        """The text of the pending tokens."""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._pending)

    def _advance(self, num_tokens: int, text: str) -> str:
        """Show the first pending tokens: ``text`` is theirs."""
        tokens, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        shown = self._decode(tokens)
        if shown and REPLACEMENT not in shown:
            self._context, self._shown = tokens, shown
        return text
