"""The wire format, as the official client sees it."""

import asyncio
from collections.abc import Generator

import openai
import pytest

from kunserve.core.config import ServerConfig
from kunserve.core.errors import Overloaded, Unavailable
from tests.unit.server.live_server import MODEL, LiveServer, live_server, run_async
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server() as server:
        yield server


def say(text: str, *after: int):
    """A script that answers ``text`` whatever the prompt."""

    def script(request):
        tokens = [*ids(text), *after]
        return tokens + [ids("!")[0]] * (request.sampling.max_tokens - len(tokens))

    return script


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello ", max_tokens=12)
    prompt = ids("hello ")
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    expected = tiny_tokenizer().decode([prompt[one % len(prompt)] for one in range(12)])
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(prompt) + 12


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="x").usage.completion_tokens == 16


def test_chat_defaults_to_what_remains(server: LiveServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}]
    )
    assert answer.usage.total_tokens == server.engine.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_chat(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(script=say("Paris!", EOS), eos_token_id=EOS)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "The capital of France?"}]},
        ],
        max_completion_tokens=50,
    )
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "Paris!")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ids("Paris!")) + 1
    request = server.engine.submitted[-1]
    text = tiny_tokenizer().decode(list(request.prompt_token_ids))
    assert text.startswith("<|start|>system\nBe brief.<|end|>")
    assert text.endswith("<|start|>assistant\n")


def test_chat_stream_equals_the_whole_answer(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(script=say("naïve 漢字 🙂 fox", EOS), eos_token_id=EOS)
    options = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 60,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content == "naïve 漢字 🙂 fox"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="abc", max_tokens=7, stream=True))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabca"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_tokens_that_come_together_share_a_chunk(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(per_tick=4)
    chunks = list(client.completions.create(model=MODEL, prompt="abc", max_tokens=16, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabcabcabcabca"
    assert len(chunks) == 4


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [
        ("hello", 1),
        (["hello", "world"], 2),
        ([5, 6, 7], 1),
        ([[5, 6, 7], [8, 9]], 2),
    ],
)
def test_spellings_of_a_prompt(
    server: LiveServer, client: openai.OpenAI, prompt, num_prompts: int
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(num_prompts))
    given = [list(request.prompt_token_ids) for request in server.engine.submitted]
    assert answer.usage.prompt_tokens == sum(map(len, given))
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        assert given == (prompt if isinstance(prompt[0], list) else [prompt])


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": ["ab", "cd"], "max_tokens": 3, "echo": True}
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == ["ababa", "cdcdc"]
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ababa", "cdcdc"]


def test_n_choices_have_their_own_seeds(server: LiveServer, client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(
            model=MODEL, prompt=["ab", "cd"], n=2, seed=7, max_tokens=3
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == ["aba", "aba", "cdc", "cdc"]
        assert answer.usage.completion_tokens == 12
        assert answer.usage.prompt_tokens == len(ids("ab")) + len(ids("cd"))
    seeds = [request.sampling.seed for request in server.engine.submitted]
    assert seeds[0] == 7 and seeds[0] != seeds[1]
    assert seeds[:2] == seeds[2:4] == seeds[4:6]


def test_requests_without_a_seed_draw_different_ones(
    server: LiveServer, client: openai.OpenAI
) -> None:
    for _ in range(3):
        client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=1)
    seeds = {request.sampling.seed for request in server.engine.submitted}
    assert len(seeds) == 6 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_chat_n_streams_are_told_apart(client: openai.OpenAI) -> None:
    texts, roles = ["", "", ""], [0, 0, 0]
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "abc"}],
        n=3,
        max_tokens=5,
        stream=True,
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
    assert len(set(texts)) == 1 and texts[0]
    assert roles == [1, 1, 1]


@pytest.mark.parametrize("per_tick", [1, 5, 100])
def test_stop_strings(server: LiveServer, client: openai.OpenAI, per_tick: int) -> None:
    server.configure(script=say("one two three four"), per_tick=per_tick)
    options = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stop": ["three", "zzz"]}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == "one two "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "three"
    streamed = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == "one two "
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == "one two three"
    assert server.engine.tasks == {}
    if per_tick == 1:  # the engine is told at once rather than left running to max_tokens
        assert len(server.engine.aborted) == 3


def test_stop_token_and_end_of_sequence(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(script=say("ab", EOS, *ids("cd"), EOS), eos_token_id=EOS)
    options = {"model": MODEL, "prompt": "x", "max_tokens": 6}
    first = client.completions.create(**options)
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("ab", "stop")
    ignoring = client.completions.create(**options, extra_body={"ignore_eos": True})
    assert ignoring.choices[0].finish_reason == "length"
    assert ignoring.choices[0].text.startswith("abcd")
    stop_id = ids("b")[0]
    stopped = client.completions.create(**options, extra_body={"stop_token_ids": [stop_id]})
    assert (stopped.choices[0].text, stopped.choices[0].stop_reason) == ("a", stop_id)


def test_min_tokens_outlives_a_stop_string(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(script=say("ababab"))
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=6, stop="b", extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].text == "aba"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    server.configure(script=say("a é"))
    tokens = ids("a é")
    options = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": len(tokens),
        "logprobs": 2,
    }
    if stream:
        parts = [
            chunk.choices[0].logprobs
            for chunk in client.completions.create(**options, stream=True)
            if chunk.choices[0].logprobs
        ]
    else:
        parts = [client.completions.create(**options).choices[0].logprobs]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [0, 1, 2, 2][: len(tokens)]
    shown = [token for part in parts for token in part.tokens]
    assert shown[0] == "a" and len(shown) == len(tokens)
    assert [value for part in parts for value in part.token_logprobs] == [-0.5] * len(tokens)
    tops = [top for part in parts for top in part.top_logprobs]
    assert all(len(top) == 2 for top in tops) and tops[0]["a"] == -0.5


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    server.configure(script=say("é!"))
    options = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": len(ids("é!")),
        "logprobs": True,
        "top_logprobs": 3,
    }
    if stream:
        content = [
            one
            for chunk in client.chat.completions.create(**options, stream=True)
            if chunk.choices[0].logprobs
            for one in chunk.choices[0].logprobs.content
        ]
    else:
        content = client.chat.completions.create(**options).choices[0].logprobs.content
    raw = b"".join(bytes(one.bytes) for one in content)
    assert raw.decode() == "é!"
    assert all(len(one.top_logprobs) == 3 and one.logprob == -0.5 for one in content)


def test_sampling_parameters_reach_the_engine(server: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=5,
        temperature=0,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "8": 1.5},
        seed=123,
        user="someone",
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "some_future_field": 1,
        },
    )
    sampling = server.engine.submitted[-1].sampling
    assert sampling.max_tokens == 5 and sampling.temperature == 0.0 and sampling.top_p == 0.9
    assert sampling.top_k == 40 and sampling.min_p == 0.05 and sampling.seed == 123
    assert sampling.presence_penalty == 0.5 and sampling.frequency_penalty == -0.5
    assert sampling.repetition_penalty == 1.1 and sampling.min_tokens == 2
    assert sampling.ignore_eos and sampling.stop_token_ids == (3,)
    assert sampling.logit_bias == ((7, -100.0), (8, 1.5)) and sampling.num_logprobs is None


def test_models(server: LiveServer, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == server.engine.max_model_len
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_error_classes(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.body == {
        "message": "The model `other` does not exist. Here is `tiny`.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=[1] * 600)
    assert too_long.value.body["message"].startswith(
        "This model's maximum context length is 512 tokens."
    )
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert hot.value.body["param"] == "temperature" and hot.value.body["code"] == 400
    assert server.engine.submitted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "retry_after"),
    [(Overloaded("Too many requests wait.", retry_after_s=7), "7"), (Unavailable("gone"), "1")],
)
def test_shed_requests(
    server: LiveServer, client: openai.OpenAI, stream: bool, error: Exception, retry_after: str
) -> None:
    server.configure(refusal=lambda request: error)
    with pytest.raises(openai.InternalServerError) as shed:
        client.completions.create(model=MODEL, prompt="x", stream=stream)
    assert shed.value.status_code == 503
    assert shed.value.response.headers["retry-after"] == retry_after
    assert shed.value.body["code"] == 503


def test_part_of_a_call_shed_is_all_of_it_shed(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(
        refusal=lambda request: Overloaded("full") if request.request_id.endswith("-2") else None
    )
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt="x", n=3)
    assert [one.rsplit("-")[-1] for one in server.engine.aborted] == ["0", "1"]
    assert server.call(lambda: server.front.num_in_flight) == 0


@pytest.mark.parametrize("fail_after", [0, 3])
def test_engine_failure_in_a_stream(
    server: LiveServer, client: openai.OpenAI, fail_after: int
) -> None:
    server.configure(fail_after=fail_after)
    stream = client.completions.create(model=MODEL, prompt="ab", max_tokens=9, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="engine failed"):
        for chunk in stream:
            text += chunk.choices[0].text
    assert text == "aba"[:fail_after]


def test_engine_failure_without_a_stream(server: LiveServer, client: openai.OpenAI) -> None:
    server.configure(fail_after=2)
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model=MODEL, prompt="ab")
    assert failed.value.status_code == 500 and failed.value.body["code"] == 500


def test_async_client_64_streams_at_once(server: LiveServer) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60.0
        ) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"number {number}"}],
                    max_tokens=40,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(64)))

    texts = run_async(main)
    for number, text in enumerate(texts):
        prompt = f"<|start|>user\nnumber {number}<|end|>\n<|start|>assistant\n"
        expected = (ids(prompt) * 40)[:40]
        assert text == tiny_tokenizer().decode(expected, skip_special_tokens=True)
    assert server.call(lambda: server.front.num_in_flight) == 0


def test_api_key() -> None:
    with live_server(server=ServerConfig(api_key="secret")) as server:
        options = {"base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(api_key="secret", **options) as client:
            client.models.list()
        with openai.OpenAI(api_key="wrong", **options) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.completions.create(model=MODEL, prompt="x")
            assert refused.value.body["code"] == 401
        with server.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
            assert http.get("/kunserve/state").status_code == 401
            assert http.get("/version", headers={"Authorization": "secret"}).status_code == 401
