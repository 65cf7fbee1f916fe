"""Prompts to token ids and back, over a Hugging Face fast tokenizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer

from kunserve.core.errors import ConfigError, InvalidRequest, PromptTooLong
from kunserve.server.api.answers.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    MarkKeeper,
    TokenBytes,
    WindowDetokenizer,
)
from kunserve.server.api.text_threads import TextThreads

NO_MARKS: Mapping[int, str] = {}
MAX_REASON_CHARS = 200
"""Of why a chat template fails, in an error message."""
_TEMPLATE_FAILURES = (
    TemplateError,
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a template may raise over messages that it was not written for."""


class FastTokenizer(Protocol):
    """What we use of ``transformers.PreTrainedTokenizerFast``."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The Rust tokenizer underneath."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages with the model's template."""
        ...


def too_long(max_model_len: int, prompt: str, max_tokens: int | None) -> PromptTooLong:
    """The error that clients know by its first words. ``prompt`` says how long it is."""
    asked = f"{prompt} in the prompt"
    if max_tokens is not None:
        asked += f", {max_tokens} in the completion"
    return PromptTooLong(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{asked}. Please reduce the length of the prompt or of the completion.",
        "max_tokens" if max_tokens is not None else "prompt",
    )


class TextCodec:
    """One tokenizer for all requests. Long prompts are encoded in threads, GIL released."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        max_model_len: int,
        inline_chars: int,
        max_waiting_chars: int = 32 << 20,
        template_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """``template_defaults`` are variables of the template that requests may set anew."""
        self._template_defaults = dict(template_defaults or {})
        self._template_owner = tokenizer
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_model_len = max_model_len
        self.threads = TextThreads(inline_chars, max_waiting_chars)
        longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._max_chars = max_model_len * longest_token
        self.token_bytes = TokenBytes(self._tokenizer)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of the prompts of one request.

        Raises PromptTooLong before encoding what cannot fit, InvalidRequest for what is no text,
        Overloaded when too much waits.
        """
        longest = max(map(len, texts))
        if longest > self._max_chars:
            at_least = longest * self._max_model_len // self._max_chars
            raise too_long(self._max_model_len, f"at least {at_least}", None)
        if not self.is_long(texts):
            return self._encode(texts, add_special_tokens)
        encoded: list[list[int]] = []
        with self.threads.room(sum(map(len, texts))):
            # In pieces, because between them other requests have their turn.
            for batch in _batches(texts, self.threads.inline_chars):
                encoded += await self.threads.call(self._encode, batch, add_special_tokens)
        return encoded

    def is_long(self, texts: Sequence[str]) -> bool:
        """Whether encoding them together takes threads, so that it is waited for."""
        return sum(map(len, texts)) > self.threads.inline_chars

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            _check_text(text)
        # The batch call is the one that releases the GIL while it works.
        encode = self._tokenizer.encode_batch_fast
        return [
            list(encode([text], add_special_tokens=add_special_tokens)[0].ids) for text in texts
        ]

    def render_chat(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt text of a conversation, by the model's chat template."""
        if self._template_owner.chat_template is None:
            raise InvalidRequest("This model has no chat template.", "messages")
        try:
            text = self._render(messages, options)
        except _TEMPLATE_FAILURES as error:
            why = str(error)[:MAX_REASON_CHARS]  # a client's own words may be in it
            raise InvalidRequest(
                f"The chat template cannot render these messages: {why}", "messages"
            ) from error
        assert isinstance(text, str), type(text)
        return text

    def _render(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> Any:
        return self._template_owner.apply_chat_template(
            list(messages), tokenize=False, **{**self._template_defaults, **options}
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        kept: Mapping[int, str] = NO_MARKS,
    ) -> Detokenizer:
        """A fresh incremental decoder for one output. ``kept`` are never skipped."""
        inner: Detokenizer
        if self.token_bytes.byte_level:
            inner = ByteDetokenizer(self.token_bytes, skip_special_tokens)
        else:
            inner = WindowDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens)
        return MarkKeeper(inner, kept) if kept and skip_special_tokens else inner

    def special_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """Those of the texts that are special tokens of this vocabulary, by id."""
        ids = {self._tokenizer.token_to_id(text): text for text in texts}
        return {id_: text for id_, text in ids.items() if id_ in self.token_bytes.special}

    def token_id(self, text: str) -> int | None:
        """The token that is this text; None if there is none."""
        return self._tokenizer.token_to_id(text)

    @property
    def vocabulary(self) -> tuple[str, tuple[int, ...]]:
        """The tokenizer's text, and the tokens that end a reply.

        There is always one, because forms are tried with it; an instance goes by the model's files.
        """
        eos_id = getattr(self._template_owner, "eos_token_id", None)
        return self._tokenizer.to_str(), (0 if eos_id is None else eos_id,)

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template."""
        owner = self._template_owner
        info: dict[str, Any] = {"tokenizer_class": type(owner).__name__}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
            value = getattr(owner, name, None)
            info[name] = value if value is None or isinstance(value, str) else str(value)
        return info

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


def check_template(tokenizer: FastTokenizer, is_given: bool, needs_tools: bool) -> None:
    """Raise ConfigError for a chat template that leaves out tools where they are needed.

    And for one that cannot be read, if it was given for this server.
    """
    template = tokenizer.chat_template
    if template is None:
        return
    if is_given:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"--chat-template, line {error.lineno}: {error.message}") from None
        except _TEMPLATE_FAILURES:
            pass  # it was not written for this message
    templates = template.values() if isinstance(template, dict) else [template]
    if needs_tools and not any("tools" in str(one) for one in templates):
        raise ConfigError(
            "--enable-auto-tool-choice: this model's chat template does not tell the model of "
            "tools, so it would never call one. Give a template that does; for models of "
            "ChatML there is --chat-template chatml_tools (docs/tools.md)"
        )


def _check_text(text: str) -> None:
    """Raise InvalidRequest for what Python has as a string, and no other program as text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"The prompt is no valid Unicode: character {error.start} is half of a surrogate pair "
            f"(U+{code:04X}). Write the whole pair, or U+FFFD."
        ) from None


def _batches(texts: Sequence[str], least_chars: int) -> Iterator[list[str]]:
    """The texts in order, in lists that end when they reach ``least_chars``."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= least_chars:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
