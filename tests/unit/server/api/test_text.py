"""Encoding, chat templates, and what is refused before any work is done."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from kunserve.cluster.api import ServingLimits
from kunserve.core.errors import InvalidRequest, PromptTooLong
from kunserve.server.api.prompts import conversation_text, encode_conversation, encode_prompts
from kunserve.server.api.schema import ChatBody, CompletionBody
from kunserve.server.api.text import TextCodec
from tests.unit.server.read_body import read_body
from tests.unit.server.tiny_tokenizer import tiny_tokenizer


def asked() -> HttpRequest:
    """Of a client that stays."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    return HttpRequest({"type": "http"}, receive)


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(tiny_tokenizer(), max_model_len=100, inline_chars=50)


@pytest.mark.parametrize("text", ["hello", "hello world " * 10])
def test_threads_and_inline_agree(codec: TextCodec, text: str) -> None:
    token_ids = asyncio.run(codec.encode([text], True))[0]
    assert token_ids == tiny_tokenizer().backend_tokenizer.encode(text).ids
    assert codec.decode(token_ids) == text
    codec.threads.close()


def test_what_cannot_fit_is_not_encoded(codec: TextCodec) -> None:
    with pytest.raises(PromptTooLong, match="^This model's maximum context length is 100 tokens"):
        asyncio.run(codec.encode(["a" * 10_000_000], True))


@pytest.mark.parametrize("text", ["a\ud800", "hello world " * 10 + "\udc00!"])
def test_what_is_no_text_is_the_clients_to_know(codec: TextCodec, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"half of a surrogate pair \(U\+D[8C]00\)"):
        asyncio.run(codec.encode(["fine", text], True))
    codec.threads.close()


LONG = "a" * 5000


@pytest.mark.parametrize(
    "body",
    [
        {"content": LONG},
        {"content": [{"type": "text", "text": LONG}]},
        {"content": "", "name": LONG},
        {"content": "", "reasoning": LONG},
        {"tool_calls": [{"function": {"name": "f", "arguments": f'{{"x": "{LONG}"}}'}}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"x": LONG}}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {"chat_template_kwargs": {"x": LONG}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_wherever_its_text_is_a_long_conversation_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    codec = TextCodec(tiny_tokenizer(), max_model_len=100, inline_chars=2000)
    held: list[int] = []

    def render(_messages: Any, _options: Any) -> str:
        held.append(codec.threads.held_chars)
        return "hi"

    monkeypatch.setattr(codec, "render_chat", render)
    whole = {name: body[name] for name in ("tools", "chat_template_kwargs") if name in body}
    message = {"role": "assistant", "content": "", **body}
    asyncio.run(encode_conversation(codec, ChatBody(messages=[message], **whole)))
    asyncio.run(encode_conversation(codec, ChatBody(messages=[{"role": "user", "content": "hi"}])))
    assert held[0] >= len(LONG) and held[1] == 0
    codec.threads.close()


def chat(codec: TextCodec, **body: Any) -> str:
    messages = body.pop("messages", [{"role": "user", "content": "hi"}])
    return conversation_text(codec, ChatBody(messages=messages, **body))


def test_the_template_ends_where_the_answer_begins(codec: TextCodec) -> None:
    assert chat(codec) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert chat(codec, add_generation_prompt=False) == "<|start|>user\nhi<|end|>\n"


def test_a_message_may_be_continued(codec: TextCodec) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    text = chat(codec, messages=messages, continue_final_message=True)
    assert text.endswith("<|start|>assistant\nI am")


def test_text_parts_are_joined_and_developers_are_systems(codec: TextCodec) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = chat(codec, messages=[{"role": "developer", "content": parts}])
    assert text.startswith("<|start|>system\na\nb<|end|>")


def test_a_model_without_a_template_says_so() -> None:
    class Plain:
        chat_template = None
        backend_tokenizer = tiny_tokenizer().backend_tokenizer

    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(TextCodec(Plain(), 100, 50))


@pytest.mark.parametrize(
    "expression", ["1 // n", "'a'.encode()[n:].decode().index('b')", "1.5 ** 5000"]
)
def test_a_template_that_fails_on_a_conversation_is_the_clients_to_know(expression: str) -> None:
    class Failing:
        chat_template = "{{ " + expression + " }}"
        backend_tokenizer = tiny_tokenizer().backend_tokenizer
        apply_chat_template = tiny_tokenizer().apply_chat_template

    codec = TextCodec(Failing(), 100, 50)
    options = {"n": 0, "chat_template": Failing.chat_template}
    with pytest.raises(InvalidRequest, match="The chat template cannot render these messages"):
        codec.render_chat([{"role": "user", "content": "hi"}], options)


def test_prompts_keep_their_order(codec: TextCodec) -> None:
    body = CompletionBody(prompt=["b", "a" * 60, "c"])
    limits = ServingLimits(100, 16, 400)
    prompts = asyncio.run(encode_prompts(asked(), codec, body, limits, 10))
    assert [codec.decode(one) for one in prompts] == ["b", "a" * 60, "c"]


def test_errors_name_the_innermost_field() -> None:
    raw = b'{"messages": [], "stream_options": {"include_usage": "x"}}'
    with pytest.raises(InvalidRequest, match=r"`stream_options.include_usage`") as error:
        read_body(ChatBody, raw)
    assert error.value.param == "stream_options"
