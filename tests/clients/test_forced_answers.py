"""What a real model answers where LangChain demands a form: a parrot says whatever one likes."""

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """The forecast for a city."""
    return f"dry in {city}"


class Place(BaseModel):
    """Where it is."""

    city: str
    is_capital: bool


@pytest.fixture
def model(real_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=real_url,
        api_key="any",
        model="smollm2-135m",
        max_retries=0,
        temperature=0,
        max_tokens=200,
    )


@pytest.mark.parametrize("choice", ["weather", "any"])
def test_a_demanded_call_comes_whole_and_with_its_own_arguments(
    model: ChatOpenAI, choice: str
) -> None:
    answer = model.bind_tools([weather], tool_choice=choice).invoke("What is the weather in Paris?")
    assert answer.response_metadata["finish_reason"] != "length"
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        assert call["name"] == "weather" and call["args"].keys() == {"city"}
    assert "Paris" in answer.tool_calls[0]["args"]["city"]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_model_as_output_is_one(model: ChatOpenAI, method: str) -> None:
    structured = model.with_structured_output(Place, method=method)
    answer = structured.invoke("Paris is the capital of France. Which city is it?")
    assert isinstance(answer, Place) and "Paris" in answer.city
