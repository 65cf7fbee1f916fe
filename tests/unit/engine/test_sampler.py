import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.engine.sampler import Sampler, uniforms

VOCAB = 40
EOS = 2


def naive(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> int:
    """The definition, a token at a time in double precision."""
    values = logits.astype(np.float64)
    if len(output) < params.min_tokens:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        for token in stops:
            values[token] = -math.inf
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(prompt) | set(output):
        scale = params.repetition_penalty
        values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    if params.temperature == 0:
        return int(np.argmax(values))
    weights = np.exp((values - values.max()) / params.temperature)
    weights /= weights.sum()
    weights[weights < params.min_p * weights.max()] = 0
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k is not None:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, kept, reached = sum(weights[token] for token in order), [], 0.0
        for token in order:
            if reached >= params.top_p * total:
                break
            kept.append(token)
            reached += weights[token]
        order = kept
    elif params.top_k is None:
        order = list(range(len(weights)))
    point = uniforms([params.seed], [len(output)])[0] * sum(weights[token] for token in order)
    for token in order:
        point -= weights[token]
        if point < 0:
            return token
    return order[-1]


def params_of(**options: object) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.just(100),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        top_k=st.sampled_from([None, 1, 3, 39, 100]),
        min_p=st.sampled_from([0.0, 0.05, 0.9]),
        seed=st.integers(-5, 2**64 + 5),
        stop_token_ids=st.sampled_from([(), (7, 3)]),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 2]),
        presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.4, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
        logit_bias=st.sampled_from([(), ((5, 3.0), (9, -100.0))]),
    )


@given(st.lists(params_of(), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_tokens_are_those_of_the_definition(many: list[SamplingParams], seed: int) -> None:
    """A mixed batch over several steps, one request with history from an earlier life."""
    generator = np.random.default_rng(seed)
    sampler = Sampler([EOS], VOCAB)
    ids = [RequestId(str(i)) for i in range(len(many))]
    prompts = [generator.integers(0, VOCAB, 6).tolist() for _ in many]
    outputs = [generator.integers(0, VOCAB, i).tolist() for i in range(len(many))]
    for name, params, prompt, output in zip(ids, many, prompts, outputs, strict=True):
        history = tuple(prompt + output) if params.needs_history else ()
        sampler.start(SequenceStart(name, params, len(prompt), history))
    for _ in range(3):
        logits = generator.normal(0, 2, (len(many), VOCAB)).astype(np.float32)
        expected = [
            naive(row, params, prompt, output)
            for row, params, prompt, output in zip(logits, many, prompts, outputs, strict=True)
        ]
        positions = [len(output) for output in outputs]
        tokens = sampler.sample(torch.from_numpy(logits.copy()), ids, positions)
        assert [token.token_id for token in tokens] == expected
        for output, token in zip(outputs, expected, strict=True):
            output.append(token)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    names = [RequestId(name) for name in "abc"]
    params = [SamplingParams(10, seed=seed, top_p=0.9) for seed in (5, 6, 7)]
    sampler = Sampler([EOS], VOCAB)
    for name, one in zip(names, params, strict=True):
        sampler.start(SequenceStart(name, one, 4, ()))
    together = [t.token_id for t in sampler.sample(logits.clone(), names, [0, 3, 9])]
    alone = [
        sampler.sample(logits[i : i + 1].clone(), [names[i]], [position])[0].token_id
        for i, position in enumerate([0, 3, 9])
    ]
    assert together == alone


def test_uniforms_are_uniform_and_distinct() -> None:
    points = uniforms([3] * 4000, range(4000))
    assert (points >= 0).all() and (points < 1).all()
    assert len(set(points.tolist())) == 4000
    assert abs(points.mean() - 0.5) < 0.02
    counts, _ = np.histogram(points, bins=10, range=(0, 1))
    assert counts.min() > 320
    neighbours = uniforms(range(4000), [0] * 4000)
    assert abs(np.corrcoef(points, neighbours)[0, 1]) < 0.06


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    sampler = Sampler([], 4)
    params = SamplingParams(5, temperature=0.0, logit_bias=((2, 50.0),), num_logprobs=2)
    sampler.start(SequenceStart(RequestId("r"), params, 1, ()))
    (token,) = sampler.sample(logits.clone(), [RequestId("r")], [0])
    expected = torch.log_softmax(logits, -1)[0]
    assert token.token_id == 2 and token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[2]))
    assert token.logprobs.rank == 2
    assert [i for i, _ in token.logprobs.top] == [1, 2]
    assert token.logprobs.top[0][1] == pytest.approx(float(expected[1]))


def test_no_logprobs_unless_asked_and_none_on_top_for_zero() -> None:
    sampler = Sampler([], 4)
    for name, num in (("none", None), ("zero", 0)):
        params = SamplingParams(5, temperature=0.0, num_logprobs=num)
        sampler.start(SequenceStart(RequestId(name), params, 1, ()))
    tokens = sampler.sample(torch.randn(2, 4), [RequestId("none"), RequestId("zero")], [0, 0])
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs is not None and tokens[1].logprobs.top == ()


def test_a_restarted_request_replaces_its_history() -> None:
    sampler = Sampler([EOS], VOCAB)
    params = SamplingParams(9, temperature=0.0, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.5
    name = RequestId("r")
    sampler.start(SequenceStart(name, params, 2, (1, 2)))
    first = [sampler.sample(logits.clone(), [name], [p])[0].token_id for p in range(3)]
    sampler.start(SequenceStart(name, params, 2, (1, 2, *first[:1])))
    again = [sampler.sample(logits.clone(), [name], [p])[0].token_id for p in (1, 2)]
    assert again == first[1:]
    sampler.forget(name)
    sampler.forget(name)
