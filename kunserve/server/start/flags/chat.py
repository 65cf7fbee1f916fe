"""Flags of chats: templates, tools and reasoning."""

import click

from kunserve.core.front_config import ChatConfig
from kunserve.server.api.parsers.names import REASONING_PARSERS, TOOL_PARSERS
from kunserve.server.start.flags.option import HintedChoice, JsonObject, all_of, flags_of

_chat = flags_of("Chat", ChatConfig())
_TOOL_HINTS = {
    "qwen2_5": "Qwen2.5 writes calls as Hermes does; write hermes",
    "qwen3": "Qwen3 writes calls as Hermes does; write hermes (Qwen3-Coder: qwen3_coder)",
    "qwen": "Qwen2.5 and Qwen3 write calls as Hermes does; write hermes",
    "llama3": "write llama3_json, or pythonic",
    "openai": "gpt-oss is not a model that KunServe serves",
}

CHAT_FLAGS = all_of(
    _chat(
        "--chat-template",
        help="File of a Jinja template, or the name of one that is shipped (chatml_tools) [the "
        "model's own].",
    ),
    _chat(
        "--default-chat-template-kwargs",
        type=JsonObject(),
        help="Variables for the template where a request does not set them, as JSON, for example "
        '{"enable_thinking": false}.',
    ),
    _chat(
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        help="Let the model decide whether it calls tools; with --tool-call-parser.",
    ),
    _chat(
        "--tool-call-parser",
        type=HintedChoice(sorted(TOOL_PARSERS), _TOOL_HINTS),
        help="How the model writes calls of tools.",
    ),
    _chat(
        "--exclude-tools-when-tool-choice-none/--no-exclude-tools-when-tool-choice-none",
        help='Do not tell the model of tools where tool_choice is "none".',
    ),
    _chat(
        "--reasoning-parser",
        type=click.Choice(sorted(REASONING_PARSERS)),
        help="How the model marks what it thinks before it answers.",
    ),
)
