"""LangChain's chat model with tools."""

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

CALLS = (
    'Let me look. <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
)
THOUGHT = "Two cities.\n</think>\n\n"


@tool
def weather(city: str, days: int = 1) -> str:
    """The forecast for a city."""
    return f"dry in {city} for {days}"


class Answer(BaseModel):
    """A number."""

    value: int


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="any", model="tiny", max_retries=0)


def test_bound_tools(model: ChatOpenAI) -> None:
    question = HumanMessage(f"SAY {THOUGHT}{CALLS}")
    bound = model.bind_tools([weather])
    answer = bound.invoke([question])
    assert answer.content == "Let me look."
    assert [call["args"] for call in answer.tool_calls] == [
        {"city": "Köln"},
        {"city": "Paris", "days": 2},
    ]
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(one, ToolMessage) for one in results)
    last = bound.invoke([question, answer, *results])
    assert last.content == "It says dry in Paris for 2."


def test_a_stream_adds_up(model: ChatOpenAI) -> None:
    total = None
    for chunk in model.bind_tools([weather]).stream(f"SAY {THOUGHT}{CALLS}"):
        total = chunk if total is None else total + chunk
    assert total is not None and total.content == "Let me look."
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [
        ("weather", {"city": "Köln"}),
        ("weather", {"city": "Paris", "days": 2}),
    ]
    assert not total.invalid_tool_calls


def test_forced_tools(model: ChatOpenAI) -> None:
    """The output of a named tool is its arguments; that of any tool a list of calls."""
    bound = model.bind_tools([weather], tool_choice="weather")
    named = bound.invoke('SAY {"city": "Oslo"}')
    assert isinstance(named, AIMessage)
    assert [call["args"] for call in named.tool_calls] == [{"city": "Oslo"}]
    required = model.bind_tools([weather], tool_choice="any").invoke(
        'SAY [{"name": "weather", "parameters": {"city": "Rome"}}]'
    )
    assert [call["args"] for call in required.tool_calls] == [{"city": "Rome"}]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_model_as_output(model: ChatOpenAI, method: str) -> None:
    structured = model.with_structured_output(Answer, method=method)
    assert structured.invoke('SAY {"value": 7}') == Answer(value=7)
