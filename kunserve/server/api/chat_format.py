"""How the answers to a chat request are read: by the server's flags and the request's wishes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kunserve.core.config import ChatConfig
from kunserve.core.errors import ConfigError
from kunserve.core.extras import extra_names, find_extra
from kunserve.core.request import ReasoningMarks, StructuredOutput
from kunserve.server.api.parsers.forced import REQUIRED, named
from kunserve.server.api.parsers.reader import MessageFormat
from kunserve.server.api.parsers.reasoning import REASONING_PARSERS, ReasoningParser
from kunserve.server.api.parsers.tool_parser import TOOL_PARSERS, ToolParser
from kunserve.server.api.schema import ChatBody
from kunserve.server.api.text import TextCodec
from kunserve.server.api.tool_choice import Tool, ToolChoice, demanded_output, read_tool_choice
from kunserve.server.api.tools import check_tools

_TAIL_TOKENS = 16
"""Of a prompt, where its template may have opened reasoning."""


@dataclass(frozen=True, slots=True)
class ChatDemand:
    """What a chat request asks of its answers, known before its prompt is."""

    tools: Sequence[Tool]
    choice: ToolChoice
    max_calls: int | None
    structured: StructuredOutput | None
    """The form that demanded calls need."""


def template_defaults(config: ChatConfig) -> dict[str, Any]:
    """Variables of the chat template where a request does not set them."""
    given = config.default_chat_template_kwargs
    return {} if given is None else dict(json.loads(given))


class ChatFormats:
    """The parsers that the server was told to use."""

    def __init__(self, config: ChatConfig) -> None:
        """Raises ConfigError for a parser that does not exist."""
        self._allows_auto = config.enable_auto_tool_choice
        self._hides_tools = config.exclude_tools_when_tool_choice_none
        tools, reasoning = config.tool_call_parser, config.reasoning_parser
        _check_known(tools, extra_names(TOOL_PARSERS), "--tool-call-parser")
        _check_known(reasoning, sorted(REASONING_PARSERS), "--reasoning-parser")
        self._parser: ToolParser | None = (
            None if tools is None else find_extra(TOOL_PARSERS, tools, "--tool-call-parser")
        )
        self._reasoning = None if reasoning is None else REASONING_PARSERS[reasoning]

    def demand(self, body: ChatBody) -> ChatDemand:
        """What a request asks for. Raises InvalidRequest for what makes no sense."""
        tools = check_tools(body.tools) or []
        choice = read_tool_choice(tools, body.tool_choice, self._allows_auto)
        max_calls = 1 if body.parallel_tool_calls is False else None
        return ChatDemand(tools, choice, max_calls, demanded_output(tools, choice, max_calls))

    def hides_tools(self, demand: ChatDemand) -> bool:
        """Whether the template is not told of the tools."""
        return self._hides_tools and demand.choice.mode == "none"

    def behind_reasoning(
        self,
        codec: TextCodec,
        body: ChatBody,
        prompt: Sequence[int],
        structured: StructuredOutput | None,
    ) -> StructuredOutput | None:
        """The form that answers have, once the model has thought, if it does."""
        reasoning = self._reasoning
        if structured is None or reasoning is None:
            return structured
        opens, closes = map(codec.token_id, (reasoning.begins, reasoning.ends))
        is_open = _is_open(reasoning, codec, body, prompt)
        if opens is None or closes is None or is_open is False:
            return structured
        marks = ReasoningMarks(opens, closes, is_open=is_open or reasoning.always)
        return replace(structured, after=marks)

    def of(
        self,
        codec: TextCodec,
        body: ChatBody,
        demand: ChatDemand,
        prompt: Sequence[int],
        structured: StructuredOutput | None,
    ) -> MessageFormat | None:
        """How to read the answers; None where all that they say is content.

        ``structured`` is the form that they have, whoever asked for it.
        """
        parser = self._tool_parser(demand.choice)
        # What has a form from its first token on has no place for reasoning.
        is_free = structured is None or structured.after is not None
        reasoning = self._reasoning if is_free else None
        if parser is None and reasoning is None:
            return None
        return MessageFormat(
            parser,
            {
                tool["function"]["name"]: tool["function"].get("parameters") or {}
                for tool in demand.tools
            },
            demand.max_calls,
            reasoning,
            None if reasoning is None else _is_open(reasoning, codec, body, prompt),
            body.include_reasoning is not False,
            demand.choice.mode != "named",
        )

    def _tool_parser(self, choice: ToolChoice) -> ToolParser | None:
        if choice.mode == "none":
            return None
        if choice.mode == "auto":
            return self._parser
        forced = REQUIRED if choice.name is None else named(choice.name)
        if self._parser is None:
            return forced
        # The model's template may want ids of its own form in the next request.
        return replace(forced, new_call_id=self._parser.new_call_id)


def _check_known(name: str | None, names: Sequence[str], flag: str) -> None:
    if name is not None and name not in names:
        raise ConfigError(f"{flag} {name}: there are {', '.join(names)}")


def _is_open(
    reasoning: ReasoningParser, codec: TextCodec, body: ChatBody, prompt: Sequence[int]
) -> bool | None:
    if body.continue_final_message:
        content = body.messages[-1].get("content")
        if isinstance(content, str):
            within = reasoning.is_open_within(content)
            if within is not None:
                return within
    return reasoning.is_open_after(codec.decode(prompt[-_TAIL_TOKENS:]))
