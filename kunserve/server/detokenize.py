"""Token ids to text, one token at a time, never cutting a character in two."""

import codecs
from collections.abc import Sequence
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


class WindowDetokenizer:
    """For every other vocabulary: decode a short window with and without the new tokens.

    The window starts with the prompt's last tokens, since such decoders treat the very first
    token of a text differently (they strip its space).
    """

    _CONTEXT = 6
    _LONGEST_CHARACTER = 8
    """Tokens after which an incomplete character is taken to be broken, and shown as such."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-self._CONTEXT :])
        self._shown = self._decode()
        self._pending = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        self._window.append(token_id)
        self._pending += 1
        text = self._decode()
        if text.endswith(REPLACEMENT) and self._pending < self._LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._advance(self._decode()) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        keep = max(self._CONTEXT, self._pending)
        self._window = self._window[-keep:]
        self._shown = self._decode()
        self._pending = 0
        return new
