"""Structured outputs as the official client asks for them."""

from collections.abc import Generator, Sequence

import openai
import pydantic
import pytest

from kunserve.core.request import Request, StructuredOutput
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
FOX = '{"name": "fox", "legs": 4}'
CHAT = [{"role": "user", "content": "Which animal?"}]


class Animal(pydantic.BaseModel):
    """An animal."""

    name: str
    legs: int


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server() as server:
        yield server


@pytest.fixture
def fox(server: LiveServer) -> LiveServer:
    """Whose engine answers with a fox, as one does that keeps to the form."""

    def script(request: Request) -> Sequence[int]:
        assert request.sampling.structured is not None
        return [*ids(FOX), EOS]

    server.configure(script=script, eos_token_id=EOS)
    return server


def form_of(server: LiveServer) -> StructuredOutput | None:
    return server.engine.submitted[-1].sampling.structured


def test_parse_gives_a_model_of_pydantic(fox: LiveServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Animal)
    assert answer.choices[0].message.parsed == Animal(name="fox", legs=4)
    form = form_of(fox)
    assert form is not None and form.kind == "json_schema"
    assert '"legs"' in form.text and '"additionalProperties": false' in form.text


def test_so_does_a_stream(fox: LiveServer, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, response_format=Animal
    ) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Animal(name="fox", legs=4)


def test_json_object(fox: LiveServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content == FOX
    assert answer.choices[0].finish_reason == "stop"
    assert form_of(fox) == StructuredOutput("json_object", "")


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"choice": ["yes", "no"]}, "guided_decoding_backend": "xgrammar"},
    ],
    ids=["plain", "with a backend"],
)
def test_extra_fields_of_completions(
    fox: LiveServer, client: openai.OpenAI, extra: dict[str, object]
) -> None:
    client.completions.create(model=MODEL, prompt="Yes or no?", n=2, extra_body=extra)
    assert form_of(fox) == StructuredOutput("choice", '["yes", "no"]')
    assert len(fox.engine.submitted) == 2


def test_a_schema_that_cannot_be_had_is_the_clients_mistake(
    fox: LiveServer, client: openai.OpenAI
) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": schema, "strict": True},
            },
        )
    assert caught.value.param == "response_format" and not fox.engine.submitted
