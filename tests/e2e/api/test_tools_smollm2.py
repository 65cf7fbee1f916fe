"""Forced calls of the built-in model, as it is, through a whole server."""

import json
from typing import Any

import openai
import pytest

from kunserve_lab.bench.server_process import running_server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: schema},
                "required": [key],
            },
        },
    }
    for name, key, schema in (
        ("get_weather", "city", {"type": "string", "maxLength": 20}),
        ("get_time", "zone", {"enum": ["UTC", "CET"]}),
    )
]


@pytest.mark.slow
def test_forced_calls_follow_their_schemas_whole_and_streamed() -> None:
    flags = ["smollm2-135m", "--num-instances", "1", "--instance-memory", "600MiB"]
    flags += ["--chat-template", "chatml_tools", "--tool-call-parser", "hermes"]
    with (
        running_server([*flags, "--enable-auto-tool-choice"]) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=200.0
        ) as client,
    ):

        def ask(choice: Any, stream: bool) -> list[tuple[str, Any]]:
            options: dict[str, Any] = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": "Is it raining in Paris at noon CET?"}],
                "tools": TOOLS,
                "tool_choice": choice,
                "temperature": 0,
                "max_tokens": 120,
            }
            if stream:
                with client.chat.completions.stream(**options) as events:
                    events.until_done()
                    (one,) = events.get_final_completion().choices
            else:
                (one,) = client.chat.completions.create(**options).choices
            assert not one.message.content
            calls = [call.function for call in one.message.tool_calls]
            return [(call.name, json.loads(call.arguments)) for call in calls]

        required = ask("required", stream=False)
        assert required and required == ask("required", stream=True)
        for name, given in required:
            assert name in ("get_weather", "get_time")
            assert given.keys() == ({"city"} if name == "get_weather" else {"zone"})
        named = {"type": "function", "function": {"name": "get_time"}}
        ((name, given),) = ask(named, stream=True)
        assert name == "get_time" and given["zone"] in ("UTC", "CET")
