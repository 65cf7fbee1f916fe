"""instructor: answers as models of pydantic."""

import openai
import pytest
from pydantic import BaseModel

instructor = pytest.importorskip("instructor")


class Person(BaseModel):
    """Who it is about."""

    name: str
    age: int


def ask(url: str, mode: "instructor.Mode", said: str, **options: object) -> object:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="any"), mode=mode)
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"SAY {said}"}],
        max_retries=0,
        **options,
    )


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_modes(url: str, mode: str) -> None:
    person = ask(url, instructor.Mode[mode], '{"name": "Zoë", "age": 30}', response_model=Person)
    assert isinstance(person, Person)
    assert person.model_dump() == {"name": "Zoë", "age": 30}


def test_partial_results_of_a_stream(url: str) -> None:
    partial = list(
        ask(
            url,
            instructor.Mode.TOOLS,
            '{"name": "Zoë", "age": 30}',
            response_model=instructor.Partial[Person],
            stream=True,
        )
    )
    assert len(partial) > 1 and partial[-1].model_dump() == {"name": "Zoë", "age": 30}
