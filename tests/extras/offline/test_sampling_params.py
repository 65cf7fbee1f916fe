"""One place for the rules: what HTTP refuses, Python refuses in the same words."""

import json
from dataclasses import fields
from typing import Any

import pytest

from kunserve import SamplingParams, StructuredOutputsParams
from kunserve.core.errors import InvalidRequest
from kunserve.server.api.schema import CompletionBody
from tests.unit.server.read_body import read_body

VLLM = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
]


def test_the_names_are_vllms() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(VLLM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -1.0),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 2.0),
        ("seed", 1 << 64),
        ("stop", ["a"] * 100),
        ("stop", [""]),
        ("stop_token_ids", ["a"]),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("logit_bias", {"a": "b"}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("truncate_prompt_tokens", -2),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
    ],
)
def test_the_rules_are_those_of_http(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as there:
        read_body(CompletionBody, json.dumps({name: value}).encode())
    with pytest.raises(InvalidRequest) as here:
        SamplingParams(**{name: value})
    assert here.value.param == there.value.param == name
    if name != "max_tokens":  # 0 means something over HTTP only, with `echo`
        assert str(here.value) == str(there.value)


def test_it_is_checked_again_when_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = -3.0
    with pytest.raises(ValueError, match="temperature"):
        params.body()


def test_forms_and_biases_become_those_of_a_body() -> None:
    form = StructuredOutputsParams(json={"type": "object"})
    body = SamplingParams(structured_outputs=form, logit_bias={7: -1.5}).body()
    given = body.model_dump(exclude_none=True)
    assert given["structured_outputs"] == {"json": {"type": "object"}}
    assert body.logit_bias == {"7": -1.5}


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
