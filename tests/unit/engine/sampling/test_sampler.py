import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SampledToken, SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.sampling import sampler as sampler_module
from kunserve.engine.sampling.sampler import Sampler, uniform
from tests.examples import examples

VOCAB = 40
EOS = 2
PLAIN = SamplingParams(9)
POINTS = [0.6524484863740322, 0.9326645886693815, 0.11519606144792216]


def naive(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> int:
    """The definition, a token at a time in double precision."""
    values = logits.astype(np.float64)
    for token in range(VOCAB):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            values[token] = -math.inf
        for word in params.bad_words:
            if [*output, token][-len(word) :] == list(word):
                values[token] = -math.inf
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
    point = uniform(params.seed, len(output)) * sum(weights[token] for token in order)
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
        allowed_token_ids=st.sampled_from([TokenIds(), TokenIds([4, 9, 12, 30, 33])]),
        bad_words=st.sampled_from([(), ((4,),), ((9, 12), (12, 12), (30, 9, 4), (33, 33))]),
    )


@given(st.lists(params_of(), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
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


def test_points_are_the_same_for_ever() -> None:
    assert [uniform(0, 0), uniform(-5, 7), uniform(2**64 + 3, 900)] == POINTS


def test_points_are_uniform_and_distinct() -> None:
    points = np.array([uniform(3, position) for position in range(4000)])
    assert (points >= 0).all() and (points < 1).all()
    assert len(set(points.tolist())) == 4000
    assert abs(points.mean() - 0.5) < 0.02
    counts, _ = np.histogram(points, bins=10, range=(0, 1))
    assert counts.min() > 320
    neighbours = np.array([uniform(seed, 0) for seed in range(4000)])
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


EXTREMES = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 88.8, -104.0]


def anything_the_api_allows(vocab: int) -> st.SearchStrategy[SamplingParams]:
    """Every value that ``server.schema`` and ``server.sampling`` let through."""
    token = st.integers(0, vocab - 1)
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**40),
        temperature=st.just(0.0) | st.floats(1e-5, 2.0),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        top_k=st.none() | st.integers(1, vocab - 1),
        min_p=st.floats(0.0, 1.0),
        seed=st.integers(0, 2**63 - 1),
        stop_token_ids=st.lists(token, max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        repetition_penalty=st.just(1.0) | st.floats(0.0, 10.0, exclude_min=True),
        logit_bias=st.lists(st.tuples(token, st.floats(-100.0, 100.0)), max_size=3).map(tuple),
        num_logprobs=st.none() | st.integers(0, 20),
    )


@st.composite
def hostile_rows(draw_: st.DrawFn, vocab: int) -> np.ndarray:
    """Logits of which any number are NaN, infinite, or at the ends of float32."""
    generator = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    row = generator.normal(0, draw_(st.sampled_from([0.0, 2.0, 1e30])), vocab)
    for _ in range(draw_(st.integers(0, 3))):
        row[generator.random(vocab) < draw_(st.sampled_from([0.03, 0.5, 1.0]))] = draw_(
            st.sampled_from(EXTREMES)
        )
    return row.astype(np.float32)


@given(st.data())
@settings(max_examples=examples(100))
def test_no_row_and_no_parameter_fails_more_than_its_request(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, VOCAB, 700]), "vocab")
    params = data.draw(st.lists(anything_the_api_allows(max(vocab, 2)), min_size=1, max_size=4))
    rows = np.stack([data.draw(hostile_rows(vocab)) for _ in params])
    names = [RequestId(str(i)) for i in range(len(params))]
    prompt = tuple(range(min(vocab, 6)))

    def sample(which: list[int]) -> list[SampledToken]:
        sampler = Sampler([0], vocab)
        for i in which:
            history = (*prompt, 0) if params[i].needs_history else ()
            sampler.start(SequenceStart(names[i], params[i], len(prompt), history))
        logits = torch.from_numpy(rows[which].copy())
        return list(sampler.sample(logits, [names[i] for i in which], [1] * len(which)))

    together = sample(list(range(len(params))))
    assert [token.request_id for token in together] == names
    for i, token in enumerate(together):
        assert sample([i]) == [token], "a neighbour changed it"
        largest = rows[i].max()
        if not math.isfinite(largest):
            assert token.token_id is None
            continue
        is_plain = not params[i].needs_history and params[i].min_tokens == 0
        if is_plain and not params[i].logit_bias:
            assert token.token_id is not None
        if token.token_id is None:
            assert token.logprobs is None
            continue
        assert 0 <= token.token_id < vocab
        assert (token.logprobs is None) == (params[i].num_logprobs is None)
        if token.logprobs is not None:
            assert math.isfinite(token.logprobs.logprob)
            assert not any(math.isnan(logprob) for _, logprob in token.logprobs.top)


def test_a_spoilt_row_ends_its_request_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that overflows, and a penalty that does, beside a request without fault."""
    sampler = Sampler([EOS], VOCAB)
    tiny_penalty = SamplingParams(9, top_p=0.9, repetition_penalty=1e-38)
    for name, params in (
        ("sound", SamplingParams(9, top_p=0.9)),
        ("nan", SamplingParams(9, top_p=0.9)),
        ("inf", SamplingParams(9, temperature=0.0, num_logprobs=2)),
        ("penalty", tiny_penalty),
    ):
        sampler.start(SequenceStart(RequestId(name), params, 3, (1, 2, 3)))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).abs() * 20
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    names = [RequestId(name) for name in ("sound", "nan", "inf", "penalty")]
    tokens = sampler.sample(logits, names, [0] * 4)
    assert tokens[0].token_id is not None
    assert [token.token_id for token in tokens[1:]] == [None] * 3
    for name in names[1:]:
        assert f"request={name}" in caplog.text
    assert "request=sound" not in caplog.text


def test_a_request_that_cannot_be_prepared_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler([EOS], VOCAB)
    sampler.start(SequenceStart(RequestId("good"), SamplingParams(9, temperature=0.0), 1, ()))
    penalised = SamplingParams(9, presence_penalty=1.0)
    sampler.start(SequenceStart(RequestId("bad"), penalised, 5, (1, 2)))  # a history too short
    assert "request=bad" in caplog.text
    tokens = sampler.sample(torch.randn(2, VOCAB), [RequestId("bad"), RequestId("good")], [0, 0])
    assert tokens[0].token_id is None and tokens[1].token_id is not None


def test_a_bug_in_sampling_ends_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = Sampler([EOS], VOCAB)
    for name, params in (("greedy", SamplingParams(9, temperature=0.0)), ("drawn", PLAIN)):
        sampler.start(SequenceStart(RequestId(name), params, 1, ()))
    monkeypatch.setattr(sampler_module, "draw", lambda *_: [][0])
    tokens = sampler.sample(
        torch.randn(2, VOCAB), [RequestId("drawn"), RequestId("greedy")], [0, 0]
    )
    assert tokens[0].token_id is None and tokens[1].token_id is not None
    assert "request=drawn" in caplog.text and "IndexError" in caplog.text


def test_a_bad_word_is_known_after_a_re_run() -> None:
    """The first token of the word was sampled before: greedy would finish the word."""
    params = SamplingParams(9, temperature=0.0, bad_words=((5, 6),))
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 7] = 3.0, 2.0
    for before, expected in (([5], 7), ([6], 6), ([], 6)):
        sampler = Sampler([], VOCAB)
        history = TokenIds([5, *before])
        sampler.start(SequenceStart(RequestId("r"), params, 1, history))
        (token,) = sampler.sample(logits.clone(), [RequestId("r")], [len(before)])
        assert token.token_id == expected


def test_where_everything_is_forbidden_the_allowed_tokens_hold() -> None:
    """Else a client could make the engine fail."""
    params = SamplingParams(9, allowed_token_ids=TokenIds([4]), bad_words=((4,),), num_logprobs=0)
    sampler = Sampler([], VOCAB)
    sampler.start(SequenceStart(RequestId("r"), params, 1, TokenIds()))
    (token,) = sampler.sample(torch.zeros(1, VOCAB), [RequestId("r")], [0])
    assert token.token_id == 4 and token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(-math.log(VOCAB))
