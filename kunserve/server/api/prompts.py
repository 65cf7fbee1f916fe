"""The four spellings of ``prompt``, and conversations, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from kunserve.cluster.api import ServingLimits
from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from kunserve.server.api.text import TextCodec, too_long
from kunserve.server.api.tools import called_tools, check_tools
from kunserve.server.api.vocabulary import check_token_ids
from kunserve.server.http.body import unless_gone

_RESERVED = (
    "conversation",
    "conversations",
    "messages",
    "self",
    "tokenize",
    "chat_template",
    "return_tensors",
    "tools",
)
"""Names that whoever renders gives itself."""
TOOL_CHARS = 4000
"""What a tool, or a past call, counts as beside its own text. So none is rendered on the event
loop."""
PIECE_CHARS = 100
"""And a message, or a part of one."""


async def encode_prompts(
    http: HttpRequest,
    codec: TextCodec,
    body: CompletionBody,
    limits: ServingLimits,
    max_requests: int,
) -> list[list[int]]:
    """Every prompt of a completion request, each with at least one token.

    Where threads work on them the client may leave meanwhile, and ClientDisconnect is raised.
    """
    spelled = _split(body.prompt)
    if len(spelled) * (body.n or 1) > max_requests:
        raise InvalidRequest(f"One call may ask for at most {max_requests} completions.", "prompt")
    texts = [one for one in spelled if isinstance(one, str)]
    if texts:
        encoding = codec.encode(texts, body.add_special_tokens is not False)
        prompts = await (unless_gone(http, encoding) if codec.is_long(texts) else encoding)
    else:
        cuts = body.truncate_prompt_tokens is not None
        prompts = [_check_ids(one, limits, cuts) for one in spelled]
    if not all(prompts):
        raise InvalidRequest("`prompt` is empty.", "prompt")
    if body.truncate_prompt_tokens is None:
        return prompts
    return [truncated(one, body, limits.max_model_len) for one in prompts]


def truncated(prompt: list[int], body: GenerationBody, max_model_len: int) -> list[int]:
    """What the client wants to be kept of its prompt."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        raise InvalidRequest("`truncate_prompt_tokens` would leave nothing.", "prompt")
    if most == -1:
        most = max(1, max_model_len - (body.asked_tokens or 1))
    return prompt[:most] if body.truncation_side == "right" else prompt[-most:]


async def echoes_of(
    codec: TextCodec, body: CompletionBody, prompts: Sequence[list[int]]
) -> list[str]:
    """Per prompt: the text to repeat before the answer. Called when the request wants it."""
    given = _split(body.prompt)
    texts = [one for one in given if isinstance(one, str)]
    if texts and body.truncate_prompt_tokens is None:
        return texts
    num_tokens = sum(map(len, prompts))
    return await codec.threads.run(num_tokens, lambda: [codec.decode(one) for one in prompts])


async def bad_words_of(codec: TextCodec, body: GenerationBody) -> tuple[tuple[int, ...], ...]:
    """The tokens of each of ``bad_words``: at the beginning of a text, and inside one.

    As vLLM does it: inside, a word has a space before it. Where that makes a token more, the
    space is a token of its own, and what follows is the word as at the beginning.
    """
    if not body.bad_words:
        return ()
    words = [word.lstrip() for word in body.bad_words]
    if not all(words):
        raise InvalidRequest("`bad_words`: a word is empty.", "bad_words")
    begins = await codec.encode(words, add_special_tokens=False)
    inside = await codec.encode([" " + word for word in words], add_special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for first, second in zip(begins, inside, strict=True):
        found[tuple(first)] = None
        if second and len(second) == len(first) and second[0] != first[0]:
            found[tuple(second)] = None
    return tuple(found)


def continued_message(body: ChatBody) -> str:
    """What ``echo`` repeats: the last message, if it is the assistant's. Called once checked."""
    if not body.echo:
        return ""
    last = _message(len(body.messages) - 1, body.messages[-1])
    return str(last["content"]) if last["role"] == "assistant" else ""


async def encode_conversation(codec: TextCodec, body: ChatBody | TokenizeBody) -> list[int]:
    """A conversation as the chat template writes it, in token ids."""
    text = await codec.threads.run(_num_chars(body), conversation_text, codec, body)
    # The template writes the special tokens itself.
    (prompt,) = await codec.encode([text], bool(body.add_special_tokens))
    if not prompt:
        raise InvalidRequest("`messages` make an empty prompt.", "messages")
    return prompt


def _split(prompt: Any) -> list[str | list[Any]]:
    """A list with one entry per prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise InvalidRequest("`prompt` is empty.", "prompt")
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, list) for item in prompt):
            return list(prompt)
    if prompt is None:
        raise InvalidRequest("`prompt` is required.", "prompt")
    raise InvalidRequest(
        "`prompt` must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids.",
        "prompt",
    )


def _check_ids(token_ids: str | list[Any], limits: ServingLimits, cuts: bool) -> list[int]:
    assert isinstance(token_ids, list), type(token_ids)
    if len(token_ids) > limits.max_model_len and not cuts:
        raise too_long(limits.max_model_len, str(len(token_ids)), None)
    return check_token_ids(token_ids, limits.vocab_size, "prompt")


def conversation_text(codec: TextCodec, body: ChatBody | TokenizeBody) -> str:
    """A conversation through the chat template, up to where the answer begins."""
    messages = [_message(index, one) for index, one in enumerate(body.messages or [])]
    if not messages:
        raise InvalidRequest("`messages` is empty.", "messages")
    generate = body.add_generation_prompt
    resume = bool(body.continue_final_message)
    if resume and generate:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            "continue_final_message",
        )
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for reserved in _RESERVED:
        if reserved in options:
            raise InvalidRequest(
                f"`chat_template_kwargs` may not set `{reserved}`.", "chat_template_kwargs"
            )
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    tools = check_tools(body.tools)
    if tools is not None:
        options["tools"] = tools
    options["continue_final_message"] = resume
    options["add_generation_prompt"] = not resume if generate is None else generate
    return codec.render_chat(messages, options)


def _num_chars(body: ChatBody | TokenizeBody) -> int:
    """About how much text there is to render."""
    num_chars = sum(map(_message_chars, body.messages or []))
    num_chars += sum(TOOL_CHARS + _json_chars(tool) for tool in body.tools or [])
    return num_chars + (_json_chars(body.chat_template_kwargs) if body.chat_template_kwargs else 0)


def _message_chars(message: Mapping[str, Any]) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    num_chars = PIECE_CHARS + _texts_chars(message)
    if isinstance(content, list):
        num_chars += sum(PIECE_CHARS + _texts_chars(part) for part in content)
    if isinstance(calls, list):
        num_chars += sum(TOOL_CHARS + _json_chars(call) for call in calls)
    return num_chars


def _texts_chars(value: Any) -> int:
    fields = value.values() if isinstance(value, Mapping) else ()
    return sum(len(one) for one in fields if isinstance(one, str))


def _json_chars(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):
        return 0  # from Python: templates judge what they cannot write


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"`{where}.role` must be a string.", "messages")
    if message.get("function_call"):
        raise InvalidRequest(
            f"`{where}.function_call` is not supported by this server; use `tool_calls`.",
            "messages",
        )
    content = message.get("content")
    kept: dict[str, Any] = {"role": "system" if role == "developer" else role}
    # An assistant that called tools may have said nothing.
    kept["content"] = "" if content is None and role == "assistant" else _content(where, content)
    if role == "assistant" and message.get("tool_calls"):
        kept["tool_calls"] = called_tools(where, message["tool_calls"])
    if role == "assistant":
        kept |= _reasoning(message)
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            kept[name] = message[name]
    return kept


def _reasoning(message: dict[str, Any]) -> dict[str, str]:
    """What the assistant thought, under both of its names: templates know one or the other."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            return {"reasoning": message[name], "reasoning_content": message[name]}
    return {}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"`{where}.content` must be a string or a list of text parts.", "messages"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"`{where}.content`: only text parts are supported, not {str(kind)[:40]!r}.",
                "messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"`{where}.content`: a text part needs `text`.", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
