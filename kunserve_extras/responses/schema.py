"""The body of POST /v1/responses, and its input as a conversation."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import (
    INT64_MAX,
    MAX_LOGPROBS,
    ChatBody,
    GenerationBody,
    Kind,
    parsed_fields,
)

WITH_LOGPROBS = "message.output_text.logprobs"
_STATELESS = "This server keeps no responses"
_REFUSED = {
    "store": f"{_STATELESS}: leave `store` out, or make it false.",
    "previous_response_id": f"{_STATELESS}: send the whole conversation as `input`.",
    "conversation": f"{_STATELESS}: send the whole conversation as `input`.",
    "prompt": "This server keeps no prompts: send `instructions` and `input`.",
    "background": f"{_STATELESS}: ask with `stream`, or wait.",
    "max_tool_calls": "Use `parallel_tool_calls`.",
    "n": "A response has one answer; /v1/chat/completions has `n`.",
    "max_tokens": "Use `max_output_tokens`.",
    "prompt_logprobs": "Use /v1/completions.",
    "return_token_ids": "Use /v1/chat/completions.",
}
"""Fields whose value must ask for nothing, and what to do instead."""


class ResponsesBody(GenerationBody):
    """POST /v1/responses, without its memory. vLLM's sampling parameters are taken too."""

    kind: ClassVar[Kind] = "chat"
    default_tokens: ClassVar[int | None] = None

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT64_MAX)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """Its ``effort`` is for templates that know it; thoughts are told whole, never summed up."""

    @model_validator(mode="before")
    @classmethod
    def _as_chat_has_it(cls, given: Any) -> Any:
        """The form of the answer, and cutting, by the names that chats have for them."""
        if not isinstance(given, dict):
            return given
        known = dict(given)
        if known.get("truncation") == "auto":
            known["truncate_prompt_tokens"] = -1
        text = known.get("text")
        form = text.get("format") if isinstance(text, dict) else None
        if isinstance(form, dict):
            known["response_format"] = form
            if form.get("type") == "json_schema":
                inner = {name: value for name, value in form.items() if name != "type"}
                known["response_format"] = {"type": "json_schema", "json_schema": inner}
        return known

    @property
    def asked_tokens(self) -> int | None:
        """See ``GenerationBody``."""
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationBody``."""
        return (self.top_logprobs or 0) if WITH_LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        """Raise InvalidRequest for what needs a memory, or another endpoint."""
        values = {**(self.model_extra or {}), **self.model_dump(include=set(_REFUSED))}
        for name, instead in _REFUSED.items():
            value = values.get(name)
            if value and not (name == "n" and value == 1):
                raise InvalidRequest(f"`{name}` is not supported here. {instead}", name)
        for one in self.include or ():
            if one != WITH_LOGPROBS:
                raise InvalidRequest(f"`include` may hold only {WITH_LOGPROBS!r}.", "include")

    def as_chat(self) -> ChatBody:
        """The chat that is asked for. Raises InvalidRequest."""
        self.check()
        shared = self.model_dump(include=set(GenerationBody.model_fields), exclude_none=True)
        effort = (self.reasoning or {}).get("effort")
        given = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
            "tools": [_tool(f"tools.{at}", tool) for at, tool in enumerate(self.tools or [])],
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": effort,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return parsed_fields(ChatBody, {**(self.model_extra or {}), **shared, **given})

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            (told,) = _messages_of(f"input.{index}", item) or (None,)
            if told is not None and not _joined(messages, told):
                messages.append(told)
        return messages


def _joined(messages: list[dict[str, Any]], told: dict[str, Any]) -> bool:
    """Whether a call became part of the message before it, which is the same answer's."""
    last = messages[-1] if messages else {}
    if "tool_calls" not in told or last.get("role") != "assistant":
        return False
    last["tool_calls"] = [*last.get("tool_calls", ()), *told["tool_calls"]]
    return True


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequest(
            f"`{where}`: a tool {kind!r} is run by a server, and not by this one: only functions "
            "are called.",
            "tools",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    """By the name that chats have for it; what is none is refused there."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _messages_of(where: str, item: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that an item of ``input`` stands for; thoughts are not told to the model."""
    kind = item.get("type", "message")
    if kind == "message":
        return [{"role": item.get("role"), "content": _content(item.get("content"))}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        call_id, output = item.get("call_id"), _content(item.get("output"))
        return [{"role": "tool", "tool_call_id": call_id, "content": output}]
    if kind == "reasoning":
        return []
    raise InvalidRequest(f"`{where}.type` {str(kind)[:40]!r} is not supported.", "input")


def _content(content: Any) -> Any:
    """Text parts by the name that chats have for them; anything else is refused there."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in texts else part
        for part in content
    ]
