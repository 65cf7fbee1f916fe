"""What the official client sees of its own prompt: log-probabilities, echo, tools in the history;
and the fields of vLLM's that shape an answer.
"""

import json
import math
from collections.abc import Generator
from typing import Any

import openai
import pytest

from kunserve.core.config import SchedulerConfig
from kunserve.server.http.limits import FrontLimits
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(limits=FrontLimits(max_prompt_logprobs=1000)) as server:
        yield server


def prompt_text(server: LiveServer) -> str:
    return tiny_tokenizer().decode(list(server.engine.submitted[-1].prompt_token_ids))


def pieces(client: openai.OpenAI, **options: Any) -> list[dict[str, Any]]:
    """``logprobs`` and text of each choice, whole or put together from a stream."""
    if not options.get("stream"):
        answer = client.completions.create(model=MODEL, **options)
        return [{"text": one.text, **one.logprobs.model_dump()} for one in answer.choices]
    found: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(model=MODEL, **options):
        one = chunk.choices[0]
        whole = found.setdefault(one.index, {"text": ""})
        whole["text"] += one.text
        for name, values in (one.logprobs.model_dump() if one.logprobs else {}).items():
            whole.setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    text = "hello é fox"
    prompt = ids(text)
    (one,) = pieces(client, prompt=text, max_tokens=2, echo=True, logprobs=1, stream=stream)
    num = len(prompt)
    assert len(one["tokens"]) == num + 2 and one["tokens"][0] == "hello"
    assert one["text"].startswith(text)
    assert one["token_logprobs"] == [None, *(-float(p) for p in range(1, num)), -0.5, -0.5]
    assert one["top_logprobs"][0] is None
    zero = tiny_tokenizer().decode([0])
    for position, top in enumerate(one["top_logprobs"][1:num], 1):
        # The likeliest token, and the prompt's own.
        assert top == {zero: -0.25, one["tokens"][position]: -float(position)}
    plain = [p for p, token in enumerate(one["tokens"][:num]) if not token.startswith("bytes:")]
    for position in plain:
        begin = one["text_offset"][position]
        assert text[begin:].startswith(one["tokens"][position])
    assert one["text_offset"] == sorted(one["text_offset"])
    assert one["text_offset"][num] == len(text)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_alone(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    """As an evaluation asks: token ids, several prompts, no answer wanted."""
    prompts = [ids("hello world"), ids("Paris"), [7]]
    options: dict[str, Any] = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    found = pieces(client, **options, stream=stream)
    for one, prompt in zip(found, prompts, strict=True):
        assert one["text"] == tiny_tokenizer().decode(prompt)
        expected = [None, *(-float(p) for p in range(1, len(prompt)))]
        assert one["token_logprobs"] == expected
        assert len(one["tokens"]) == len(one["text_offset"]) == len(prompt)
    answer = client.completions.create(model=MODEL, **options)
    assert answer.usage.completion_tokens == 0
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert server.engine.submitted[-1].sampling.max_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_logprobs_asks_for_none(
    server: LiveServer, client: openai.OpenAI, stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hi", max_tokens=0, echo=True, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.engine.submitted[-1].sampling.num_prompt_logprobs is None


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    options = {"prompt": [5, 6], "max_tokens": 1, "echo": True, "logprobs": 1}
    (one,) = pieces(client, **options, extra_body={"return_tokens_as_token_ids": True})
    assert one["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
    assert one["top_logprobs"][1] == {"token_id:0": -0.25, "token_id:6": -1.0}
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=1,
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert chat.choices[0].logprobs.content[0].token.startswith("token_id:")


def test_prompt_logprobs_of_every_choice(client: openai.OpenAI) -> None:
    prompts = [ids("hello"), ids("fox")]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        prompt = prompts[choice.index // 2]
        first, *others = choice.prompt_logprobs
        assert first is None and len(others) == len(prompt) - 1
        assert choice.logprobs is None
        for position, one in enumerate(others, 1):
            own = one[str(prompt[position])]
            assert own["logprob"] == -position and own["rank"] == 2
            assert own["decoded_token"] == tiny_tokenizer().decode([prompt[position]])
            assert one["0"]["rank"] == 1 and len(one) == len({0, 1, prompt[position]})


def test_prompt_logprobs_of_a_chat(server: LiveServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    prompt = list(server.engine.submitted[-1].prompt_token_ids)
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [list(map(int, one)) for one in others] == [[token] for token in prompt[1:]]


def test_more_than_the_front_would_keep_is_refused(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 9}}
    with pytest.raises(openai.BadRequestError, match="at most 1000"):
        client.completions.create(model=MODEL, prompt=[5] * 101, **options)
    client.completions.create(model=MODEL, prompt=[5] * 100, **options)
    with pytest.raises(openai.BadRequestError, match="20"):
        client.completions.create(model=MODEL, prompt="x", logprobs=21)


def test_minus_infinity_and_numbers_survive_json(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt=[5] * 90, max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = json.loads(answer.text)["choices"]
    assert all(math.isfinite(one) for one in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["top_logprobs"] == [None] * 90


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_may_repeat_the_message_that_it_continues(
    client: openai.OpenAI, stream: bool
) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}],
        max_tokens=3,
        stream=stream,
        extra_body={"echo": True, "continue_final_message": True},
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text.startswith("Well, ") and len(text) > len("Well, ")


TELL_IDS = {"return_token_ids": True}
CALL = {"name": "weather", "arguments": '{"city": "Paris"}'}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_an_agents_transcript_is_replayed(server: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "dry"},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=1,
    )
    text = prompt_text(server)
    assert text.startswith("<|start|>tools\n") and '"weather"' in text
    assert "<|start|>assistant\nweather:Paris<|end|>" in text
    assert "<|start|>tool\ndry<|end|>" in text


def test_calling_tools_is_refused_with_a_way_out(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="requires --enable-auto-tool-choice"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], tools=TOOLS
        )


def test_words_and_tokens_that_shape_the_answer(server: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=1,
        n=2,
        extra_body={"allowed_token_ids": [9, 3], "bad_words": ["fox", " zq"], "best_of": 2},
    )
    sampling = server.engine.submitted[-1].sampling
    assert sampling.allowed_token_ids == (9, 3)
    # Inside a text a word has a space before it; where that is one token with it, both count.
    assert set(sampling.bad_words) >= {tuple(ids("fox")), tuple(ids("zq"))}
    inside = tuple(ids(" fox"))
    assert (inside in sampling.bad_words) == (len(inside) == len(ids("fox")))


def test_an_evaluation_learns_of_the_tokenizer(server: LiveServer) -> None:
    with server.client() as http:
        info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and info["bos_token"] is None
    assert "<|start|>" in info["chat_template"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_tells_its_tokens(client: openai.OpenAI, stream: bool) -> None:
    prompts = [ids("hello é"), ids("fox")]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=5, stream=stream, extra_body=TELL_IDS
    )
    told: dict[int, list[int]] = {0: [], 1: []}
    asked: dict[int, list[list[int]]] = {0: [], 1: []}
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            told[choice.index] += choice.token_ids
            if getattr(choice, "prompt_token_ids", None):
                asked[choice.index].append(choice.prompt_token_ids)
    assert told == {index: (one * 5)[:5] for index, one in enumerate(prompts)}
    assert asked == {index: [one] for index, one in enumerate(prompts)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_its_tokens(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "é"}],
        n=2,
        max_tokens=6,
        stream=stream,
        extra_body=TELL_IDS,
    )
    told: dict[int, list[int]] = {0: [], 1: []}
    asked = []
    for chunk in answer if stream else [answer]:
        asked += [chunk.prompt_token_ids] if getattr(chunk, "prompt_token_ids", None) else []
        for choice in chunk.choices:
            told[choice.index] += getattr(choice, "token_ids", None) or []
    prompt = list(server.engine.submitted[-1].prompt_token_ids)
    assert told == {0: prompt[:6], 1: prompt[:6]}
    assert asked == [prompt] * (2 if stream else 1)  # a stream tells it once for each choice


def test_nobody_is_told_of_tokens_who_did_not_ask(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1)
    assert "token_ids" not in raw.text


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": -1}, slice(-512 + 4, None)),
        ({"truncate_prompt_tokens": 1 << 40, "max_tokens": 1}, slice(0, None)),
    ],
)
def test_a_long_prompt_is_cut(
    server: LiveServer, client: openai.OpenAI, options: dict[str, Any], kept: slice
) -> None:
    prompt = [i % 250 for i in range(600 if options["truncate_prompt_tokens"] < 9 else 500)]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, extra_body={"max_tokens": 4, **options}
    )
    assert list(server.engine.submitted[-1].prompt_token_ids) == prompt[kept]
    assert answer.choices[0].text.startswith(tiny_tokenizer().decode(prompt[kept]))
    assert answer.usage.prompt_tokens == len(prompt[kept])


def test_a_conversation_is_cut(server: LiveServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "zq " * 600}],
        max_tokens=2,
        extra_body={"truncate_prompt_tokens": -1},
    )
    assert len(server.engine.submitted[-1].prompt_token_ids) == 510
    assert prompt_text(server).endswith("<|start|>assistant\n")


@pytest.mark.parametrize(
    "options",
    [
        {"suffix": "after"},
        {"use_beam_search": True},
        {"length_penalty": 2.0},
        {"priority": 1},
        {"truncate_prompt_tokens": 0},
        {"truncation_side": "middle"},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"best_of": 3},
    ],
)
def test_what_would_change_the_answer_is_refused(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(options))):
        client.completions.create(model=MODEL, prompt="x", extra_body=options)


def test_what_would_change_nothing_is_taken(client: openai.OpenAI) -> None:
    neutral = {"suffix": "", "use_beam_search": False, "length_penalty": 1.0, "priority": 0}
    more = {"spaces_between_special_tokens": False, "best_of": 1, "logits_processors": None}
    client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body=neutral | more)


def test_a_priority_comes_to_the_engine() -> None:
    """By every API that generates."""
    with (
        live_server(scheduler=SchedulerConfig(scheduling_policy="priority")) as server,
        server.client() as http,
    ):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "priority": -3}
        for path, body in (
            ("completions", {"prompt": "x", "max_tokens": 1, "priority": -3}),
            ("chat/completions", chat),
            ("messages", chat | {"max_tokens": 1}),
            ("responses", {"input": "x", "max_output_tokens": 1, "priority": -3}),
        ):
            assert http.post(f"/v1/{path}", json=body).status_code == 200
            assert server.engine.submitted[-1].priority == -3
        too_far = {"prompt": "x", "priority": 1 << 63}
        assert http.post("/v1/completions", json=too_far).status_code == 400
