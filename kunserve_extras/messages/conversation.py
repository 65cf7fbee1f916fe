"""A conversation in Anthropic's blocks, as the messages of a chat."""

from typing import Any

from kunserve.core.errors import InvalidRequest

ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt. It differs from request to request,
so no beginning would be found in the cache, and it tells the model nothing."""
_ROLES = ("user", "assistant", "system")


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """``system`` and ``messages`` as a chat has them. Raises InvalidRequest for other blocks."""
    told: list[dict[str, Any]] = []
    if system:
        kept = "\n".join(_system_texts(system))
        if kept:
            told.append({"role": "system", "content": kept})
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        told += _Turn(f"messages.{index}", names).read(message)
    return told


def _system_texts(system: str | list[dict[str, Any]]) -> list[str]:
    blocks = [system] if isinstance(system, str) else _texts("system", system)
    lines = [block.split("\n") for block in blocks]
    kept = [[line for line in block if not line.startswith(ATTRIBUTION)] for block in lines]
    return ["\n".join(block) for block in kept if block]


def _texts(where: str, blocks: list[Any]) -> list[str]:
    """Of blocks that may be texts only."""
    return [_text(f"{where}.{index}", block) for index, block in enumerate(blocks)]


def _text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind != "text":
        raise InvalidRequest(f"`{where}`: a block {str(kind)[:40]!r} is not supported.", "messages")
    if not isinstance(block.get("text"), str):
        raise InvalidRequest(f"`{where}.text` must be a string.", "messages")
    text: str = block["text"]
    return text


class _Turn:
    """One message being read. Results of tools become messages of their own."""

    def __init__(self, where: str, names: dict[str, str]) -> None:
        self._where = where
        self._names = names
        """Of the tools that were called so far, by the calls' ids."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []

    def read(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages that it stands for."""
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise InvalidRequest(
                f"`{self._where}.role` must be one of {', '.join(_ROLES)}.", "messages"
            )
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        if not isinstance(content, list):
            raise InvalidRequest(
                f"`{self._where}.content` must be a string or a list of blocks.", "messages"
            )
        for index, block in enumerate(content):
            self._read(role, f"{self._where}.content.{index}", block)
        self._end_texts(role, is_last=True)
        return self._told

    def _read(self, role: str, where: str, block: Any) -> None:
        kind = block.get("type") if isinstance(block, dict) else None
        if role == "user" and kind == "tool_result":
            self._end_texts(role)
            self._told.append(self._result(where, block))
        elif role == "assistant" and kind == "tool_use":
            self._calls.append(self._call(where, block))
        elif role == "assistant" and kind == "thinking":
            self._thoughts.append(str(block.get("thinking") or ""))
        elif role == "assistant" and kind == "redacted_thinking":
            pass  # nobody but its author can read it
        else:
            self._texts.append(_text(where, block))

    def _end_texts(self, role: str, is_last: bool = False) -> None:
        if not self._texts and not self._calls and (self._told or not is_last):
            return
        message: dict[str, Any] = {"role": role, "content": "\n".join(self._texts)}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._thoughts:
            message["reasoning"] = "\n".join(self._thoughts)
        self._told.append(message)
        self._texts = []

    def _call(self, where: str, block: dict[str, Any]) -> dict[str, Any]:
        call_id, name = _string(where, block, "id"), _string(where, block, "name")
        self._names[call_id] = name
        function = {"name": name, "arguments": block.get("input")}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, where: str, block: dict[str, Any]) -> dict[str, Any]:
        call_id, content = _string(where, block, "tool_use_id"), block.get("content")
        if isinstance(content, list):
            content = "\n".join(_texts(f"{where}.content", content))
        elif content is not None and not isinstance(content, str):
            raise InvalidRequest(
                f"`{where}.content` must be a string or a list of blocks.", "messages"
            )
        told = {"role": "tool", "tool_call_id": call_id, "content": content or ""}
        name = self._names.get(call_id)
        return told if name is None else {**told, "name": name}


def _string(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"`{where}.{name}` must be a string.", "messages")
    return value
