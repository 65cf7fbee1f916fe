"""Settings of what speaks HTTP: how chats are read, and what is logged."""

from dataclasses import dataclass
from typing import Literal

from kunserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How conversations become prompts, and what the text of answers means."""

    chat_template: str | None = None
    """A file, or the name of a shipped one; the model's own when None."""
    default_chat_template_kwargs: str | None = None
    """A JSON object: variables of the template where a request does not set them."""
    enable_auto_tool_choice: bool = False
    """Whether the model may decide to call tools."""
    tool_call_parser: str | None = None
    """How the model writes calls, by vLLM's names."""
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    """How the model marks reasoning; None: all that it says is content."""

    def __post_init__(self) -> None:
        """Calls that nobody could read are a mistake."""
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice requires --tool-call-parser: how the model writes calls"
            )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written to standard error, by the front and by every instance. Traces, too."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    enable_log_requests: bool = False
    """A line when a request arrives, and one when it has ended."""
    max_log_len: int | None = None
    """Characters of each prompt in those lines; None: prompts are not logged."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    uvicorn_access_log: bool = False
    """A line for every HTTP request."""
    otlp_traces_endpoint: str | None = None
    """Where an OpenTelemetry collector takes spans by HTTP; None: none are made."""

    def __post_init__(self) -> None:
        """No flag is ignored, and spans are sent by HTTP, not by gRPC."""
        if self.max_log_len is not None and not self.enable_log_requests:
            raise ConfigError(
                "--max-log-len is about lines that are not written: give --enable-log-requests too"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"traces are sent by HTTP; write http://localhost:4318/v1/traces, not {endpoint}"
            )
