"""Templates with tools: the shipped one, those of the usual families in small, and wrong ones.

The small ones say the same with the same fields as the templates of these families, and no more.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from kunserve.core.errors import ConfigError, InvalidRequest
from kunserve.server.api.chat_templates import read_chat_template, shipped_templates
from kunserve.server.api.parsers.reader import MessageFormat
from kunserve.server.api.prompts import conversation_text
from kunserve.server.api.schema import ChatBody
from kunserve.server.api.text import TextCodec, check_template
from tests.unit.server.api.parsers.reading import TOOL_PARSERS, read
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}{% endif %}<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant"
    "{% if message.reasoning_content is string and loop.last is false %}\n<think>\n"
    "{{ message.reasoning_content }}\n</think>\n{% endif %}"
    "{% if message.content %}\n{{ message.content }}{% endif %}"
    "{% for tool_call in message.tool_calls %}"
    "{% if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}"
    '\n<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
    "{{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}"
    "\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}<|start_header_id|>"
    "{% if message.role == 'tool' or message.role == 'ipython' %}ipython<|end_header_id|>\n\n"
    "{% if message.content is mapping %}{{ message.content | tojson }}{% else %}"
    "{{ message.content }}{% endif %}<|eot_id|>"
    "{% elif 'tool_calls' in message %}"
    "{% if not message.tool_calls | length == 1 %}"
    '{{ raise_exception("one call only") }}{% endif %}'
    "{% set tool_call = message.tool_calls[0].function %}assistant<|end_header_id|>\n\n"
    '{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot_id|>'
    "{% else %}{{ message.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n"
    "{% endfor %}{% endif %}{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools is not none and loop.last %}[AVAILABLE_TOOLS] [{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ message.content }}[/INST]"
    "{% elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] ["
    "{% for call in message.tool_calls %}{% set out = call.function | tojson %}"
    "{% if call.id is undefined or call.id | length != 9 %}"
    '{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}'
    '{% endif %}{{ out[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]</s>'
    "{% elif message.role == 'assistant' %} {{ message.content }}</s>"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ message.content | tojson }},"
    ' "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
FAMILIES = {
    "qwen": (QWEN, "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}'),
    "llama3": (LLAMA3, "llama3_json", '{"name": "weather", "parameters": {"city": "Köln"}}'),
    "mistral": (MISTRAL, "mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": '),
    "shipped": (
        read_chat_template("chatml_tools"),
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}',
    ),
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, chat_template=template
    )


def codec_of(template: str, **defaults: Any) -> TextCodec:
    return TextCodec(tokenizer_of(template), 4000, 10_000, template_defaults=defaults)


def history(call_id: str) -> list[dict[str, Any]]:
    call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    return [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "dry"},
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_goes_back_as_the_model_wrote_it(family: str) -> None:
    template, parser, written = FAMILIES[family]
    codec = codec_of(template)
    check_template(tokenizer_of(template), is_given=True, needs_tools=True)
    call_id = TOOL_PARSERS[parser].new_call_id()
    body = ChatBody(messages=history(call_id), tools=[TOOL], tool_choice="none")
    text = conversation_text(codec, body)
    assert written in text and "dry" in text
    first = conversation_text(codec, ChatBody(messages=history(call_id)[:1], tools=[TOOL]))
    assert '"name": "weather"' in first
    # What the template writes for a past call is what the parser reads.
    shown = text[text.index(written) :].partition("<|")[0].partition("</s>")[0]
    message = read([shown], MessageFormat(TOOL_PARSERS[parser]))
    assert message.parsed == [("weather", {"city": "Köln"})]


def test_reasoning_goes_back_under_the_name_that_templates_know() -> None:
    assert "<think>\nHm.\n</think>" in conversation_text(
        codec_of(QWEN), ChatBody(messages=history("c"), tools=[TOOL])
    )


def test_thinking_is_switched_by_the_request_and_by_default() -> None:
    user = [{"role": "user", "content": "x"}]
    codec = codec_of(QWEN, enable_thinking=False)
    assert conversation_text(codec, ChatBody(messages=user)).endswith("</think>\n\n")
    asked = ChatBody(messages=user, chat_template_kwargs={"enable_thinking": True})
    assert conversation_text(codec, asked).endswith("assistant\n")


def test_the_shipped_template() -> None:
    codec = codec_of(read_chat_template("chatml_tools"))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    plain = conversation_text(codec, ChatBody(messages=messages))
    assert plain == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with_tools = conversation_text(codec, ChatBody(messages=messages, tools=[TOOL]))
    assert with_tools.startswith("<|im_start|>system\nBe kind.\n\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in with_tools
    results = [{"role": "tool", "content": one} for one in ("a", "b")]
    two = conversation_text(codec, ChatBody(messages=[*messages, *results]))
    assert two.count("<|im_start|>user") == 2 and two.count("<tool_response>") == 2
    call = history("c")[1] | {"content": "Wait."}
    said = conversation_text(codec, ChatBody(messages=[*messages, call]))
    assert "<|im_start|>assistant\nWait.\n<tool_call>\n" in said


def test_every_shipped_template_is_one() -> None:
    assert shipped_templates() == ["chatml_tools"]
    for name in shipped_templates():
        jinja2.Environment().parse(read_chat_template(name))


def test_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    assert read_chat_template(str(file)) == "{{ messages[0].content }}!"
    with pytest.raises(ConfigError, match="chatml_tools"):
        read_chat_template(str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="--chat-template"):
        read_chat_template(str(tmp_path))


def test_templates_that_do_not_do() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        check_template(tokenizer_of("a\n{% if %}"), is_given=True, needs_tools=False)
    user = [{"role": "user", "content": "x"}]
    for picky in ("{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ nothing.here.at.all }}"):
        check_template(tokenizer_of(picky), is_given=True, needs_tools=False)
        with pytest.raises(InvalidRequest, match="cannot render"):
            conversation_text(codec_of(picky), ChatBody(messages=user))
    with pytest.raises(ConfigError, match="chatml_tools"):
        check_template(tokenizer_of("{{ messages }}"), is_given=False, needs_tools=True)
    check_template(tokenizer_of("{% if %}"), is_given=False, needs_tools=False)
    with pytest.raises(InvalidRequest, match="cannot render"):
        conversation_text(codec_of("{% if %}"), ChatBody(messages=user))


def test_a_system_message_that_a_template_has_no_place_for() -> None:
    """As Gemma 2's: the client is told what the template says of it."""
    codec = codec_of(
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ message.role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    )
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "y"}
    assert conversation_text(codec, ChatBody(messages=[user])).startswith("<start_of_turn>user\nx")
    with pytest.raises(InvalidRequest, match="messages: System role not supported"):
        conversation_text(codec, ChatBody(messages=[system, user]))
    with pytest.raises(InvalidRequest, match="must alternate"):
        conversation_text(codec, ChatBody(messages=[user, user]))


def test_the_built_in_model_needs_the_shipped_template() -> None:
    from kunserve.model.source import resolve_model
    from kunserve.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    with pytest.raises(ConfigError, match="--chat-template chatml_tools"):
        check_template(tokenizer, is_given=False, needs_tools=True)
    tokenizer.chat_template = read_chat_template("chatml_tools")
    check_template(tokenizer, is_given=True, needs_tools=True)


def test_the_effort_of_reasoning_is_the_templates() -> None:
    codec = codec_of("{{ messages[0].content }} {{ reasoning_effort }}")
    user = [{"role": "user", "content": "x"}]
    assert conversation_text(codec, ChatBody(messages=user, reasoning_effort="low")) == "x low"
