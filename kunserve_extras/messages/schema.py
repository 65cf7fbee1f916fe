"""The body of POST /v1/messages, as the chat that it stands for."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import (
    INT64_MAX,
    ChatBody,
    GenerationBody,
    Kind,
    StopList,
    parsed_fields,
)
from kunserve_extras.messages.conversation import chat_messages

_UNTOLD = ("cache_control", "context_management", "diagnostics", "inference_geo", "speed", "betas")
"""Fields that change no answer here: the cache finds every beginning by itself."""
_REFUSED = ("container", "mcp_servers")


class Tool(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same for a chat. Raises InvalidRequest for a tool that a server would run."""
        if self.type not in (None, "custom"):
            raise InvalidRequest(
                f"`tools`: {self.type[:80]!r} is run by a server, and not by this one.", "tools"
            )
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema or {}}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(BaseModel):
    """Whether the answer may, must or must not call tools."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Fields of a chat."""
        choice: Any = "required" if self.type == "any" else self.type
        if self.type == "tool":
            choice = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Thinking(BaseModel):
    """Whether the model may think. Its budget is not held: the model does not know of it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


class OutputFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    type: Literal["json_schema"]
    of: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The form of the answer, and how much the model should think."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(GenerationBody):
    """POST /v1/messages/count_tokens. vLLM's sampling parameters are taken too."""

    kind: ClassVar[Kind] = "chat"
    default_tokens: ClassVar[int | None] = None

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: StopList | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationBody``."""
        return None

    def as_chat(self) -> ChatBody:
        """The chat that is asked for. Raises InvalidRequest."""
        extra = self.model_extra or {}
        for name in _REFUSED:
            if extra.get(name):
                raise InvalidRequest(f"`{name}` is not supported by this server.", name)
        shared = self.model_dump(include=set(GenerationBody.model_fields), exclude_none=True)
        fields = {**extra, **shared, "messages": chat_messages(self.system, self.messages)}
        for name in _UNTOLD:
            fields.pop(name, None)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.tools:
            fields["tools"] = [tool.as_chat() for tool in self.tools]
            if self.tool_choice is not None:
                fields |= self.tool_choice.as_chat()
        if self.thinking is not None:
            told = fields.get("chat_template_kwargs") or {}
            may_think = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": may_think, **told}
            fields["include_reasoning"] = may_think
        config = self.output_config
        if config is not None and config.effort is not None:
            fields["reasoning_effort"] = config.effort
        if config is not None and config.format is not None:
            form = {"name": "answer", "schema": config.format.of}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if _goes_on(fields["messages"]):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return parsed_fields(ChatBody, fields)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=INT64_MAX)


def _goes_on(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last message, which is the assistant's own."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and not last.get("tool_calls")
