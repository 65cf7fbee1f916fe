"""The device's sampler says what the host's does, but where a point lies on a border."""

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from kunserve.core.ids import RequestId
from kunserve.core.request import SamplingParams
from kunserve.core.step import SampledToken, SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.sampling import sampler as host
from kunserve.engine.sampling.sampler import Sampler
from kunserve_extras.torch_body.sampler import ROWS_AT_ONCE, TorchSampler
from tests.examples import examples
from tests.strict_device import DEVICE, StrictDevice, lies_on_device
from tests.tape import PlainDispatchMode

VOCAB = 3001
EOS = 2
PROMPT = (5, 6, 7, 6, 900, 5)

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.none() | st.sampled_from([1, 2, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(-5, 2**64),
    stop_token_ids=st.sampled_from([(), (11, 12, 99_999)]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.05, 0.8]),
    logit_bias=st.sampled_from([(), ((9, 8.0), (900, -100.0)), ((3000, 4.0), (77_777, 9.0))]),
    allowed_token_ids=st.sampled_from([TokenIds(), TokenIds([4, 900, 30]), TokenIds(range(2000))]),
    bad_words=st.sampled_from([(), ((4,), (900,), (30,)), ((900, 30), (4, 4), (10, 99_999))]),
    num_logprobs=st.none() | st.sampled_from([0, 1, 5]),
)
KINDS = [
    SamplingParams(100, temperature=0.0),
    SamplingParams(100, seed=1),
    SamplingParams(100, top_p=0.8, seed=2),
    SamplingParams(100, top_k=5, seed=3),
    SamplingParams(100, frequency_penalty=0.5, repetition_penalty=1.3, seed=4),
    SamplingParams(100, temperature=0.0, num_logprobs=2),
    SamplingParams(100, min_p=0.1, min_tokens=2, seed=5),
    SamplingParams(100, temperature=0.0, logit_bias=((9, 100.0),)),
    SamplingParams(100, allowed_token_ids=TokenIds([8, 9, 10]), bad_words=((9,),), seed=6),
    SamplingParams(100, 0.7, 0.8, 20, seed=7, repetition_penalty=1.05, num_logprobs=4),
]
"""Every kind of row."""


def logits_of(seed: int, num: int, levels: int = 1000) -> np.ndarray:
    """Few levels make many equal logits."""
    rows = np.random.default_rng(seed).normal(0, 4, (num, VOCAB))
    return np.round(rows * levels / 3).astype(np.float32) * np.float32(3 / levels)


def start_of(number: int, params: SamplingParams, output: list[int]) -> SequenceStart:
    tokens = TokenIds([*PROMPT, *output]) if params.needs_history else TokenIds()
    return SequenceStart(RequestId(f"r{number}"), params, len(PROMPT), tokens)


def hosts_token(
    params: SamplingParams, output: list[int], row: np.ndarray, shift: float = 0.0
) -> SampledToken:
    """What the host's sampler says to a request that begins with this output."""
    sampler = Sampler((EOS,), VOCAB)
    sampler.start(start_of(0, params, output))
    at = host.uniform(params.seed, len(output)) + shift
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "uniform", lambda seed, position: min(max(at, 0.0), 1 - 1e-12))
        logits = torch.from_numpy(row[None].copy())
        (token,) = sampler.sample(logits, [RequestId("r0")], [len(output)])
    return token


def assert_is_the_hosts(
    found: SampledToken, params: SamplingParams, output: list[int], row: np.ndarray
) -> None:
    shifts = (0.0, -1e-5, 1e-5)
    expected = next(
        (
            one
            for one in (hosts_token(params, output, row, shift) for shift in shifts)
            if one.token_id == found.token_id
        ),
        None,
    )
    assert expected is not None, (found, params, output)
    if expected.logprobs is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    assert found.logprobs.rank == expected.logprobs.rank
    assert found.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=2e-6)
    ids, values = zip(*expected.logprobs.top, strict=True) if expected.logprobs.top else ((), ())
    assert tuple(one for one, _ in found.logprobs.top) == ids
    assert [one for _, one in found.logprobs.top] == pytest.approx(values, abs=2e-6)


def run(
    params: list[SamplingParams], steps: list[np.ndarray], which: list[int] | None = None
) -> list[list[SampledToken]]:
    """The tokens of these rows at each step, as one batch from start to end."""
    which = list(range(len(params))) if which is None else which
    sampler, ids = TorchSampler((EOS,), VOCAB), [RequestId(f"r{i}") for i in which]
    for number in which:
        sampler.start(start_of(number, params[number], []))
    return [
        [*sampler.sample(torch.from_numpy(rows[which]), ids, [position] * len(ids))]
        for position, rows in enumerate(steps)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    levels=st.sampled_from([2, 1000]),
)
def test_tokens_are_the_hosts(params: list[SamplingParams], seed: int, levels: int) -> None:
    """Histories that the device goes on with are those that the host would be told."""
    steps = [logits_of(seed + i, len(params), levels) for i in range(4)]
    outputs: list[list[int]] = [[] for _ in params]
    for rows, sampled in zip(steps, run(params, steps), strict=True):
        for one, row, output, found in zip(params, rows, outputs, sampled, strict=True):
            assert_is_the_hosts(found, one, output, row)
            assert found.token_id is not None
            output.append(found.token_id)


@settings(max_examples=examples(30), deadline=None)
@given(params=st.lists(PARAMS, min_size=2, max_size=6), seed=st.integers(0, 1000), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(
    params: list[SamplingParams], seed: int, data: st.DataObject
) -> None:
    """To the last bit of its log-probabilities, alone or in any part of the batch."""
    steps = [logits_of(seed + i, len(params)) for i in range(3)]
    together = run(params, steps)
    some = data.draw(st.permutations(range(len(params))))[: data.draw(st.integers(1, len(params)))]
    for whole, part in zip(together, run(params, steps, some), strict=True):
        assert [whole[number] for number in some] == part


def test_every_kind_of_row_in_one_batch() -> None:
    steps = [logits_of(i, len(KINDS)) for i in range(3)]
    outputs: list[list[int]] = [[] for _ in KINDS]
    for rows, sampled in zip(steps, run(KINDS, steps), strict=True):
        for one, row, output, found in zip(KINDS, rows, outputs, sampled, strict=True):
            assert_is_the_hosts(found, one, output, row)
            assert found.token_id is not None
            output.append(found.token_id)


class Calls(PlainDispatchMode):
    """How often each operation of torch is asked for; views cost a device nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Crossings(TorchFunctionMode):
    """What goes from the device to the host, which waits for it, and the other way."""

    AWAITED: ClassVar = {
        torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__bool__,
        torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
        torch.Tensor.nonzero, torch.nonzero, torch.Tensor.unique, torch.unique,
        torch.masked_select, torch.Tensor.masked_select, torch.equal,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.awaited = self.sent = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        self.awaited += func in self.AWAITED and any(map(lies_on_device, tensors))
        if func is torch.Tensor.copy_:
            self.sent += lies_on_device(args[0]) and not lies_on_device(args[1])
        else:
            assert func is not torch.tensor or kwargs.get("device") is None, "a copy of its own"
            assert func is not torch.Tensor.to or args[1] is not DEVICE, "a copy of its own"
        return func(*args, **kwargs)


@pytest.mark.parametrize("asked", [[one] for one in KINDS] + [KINDS])
def test_one_copy_each_way_and_calls_that_rows_do_not_add_to(asked: list[SamplingParams]) -> None:
    """Where no row's filters leave more than can be listed."""
    found = []
    for times in (2, 20):
        params = [one for one in asked for _ in range(times)]
        ids = [RequestId(f"r{i}") for i in range(len(params))]
        with StrictDevice(), Crossings() as crossings, Calls() as calls:
            sampler = TorchSampler((EOS,), VOCAB, device=DEVICE)
            for number, one in enumerate(params):
                sampler.start(start_of(number, one, []))
            for position in range(2):
                logits = torch.from_numpy(logits_of(position, len(params))).to("cpu:0")
                before = (crossings.awaited, crossings.sent, Counter(calls.counts))
                sampler.sample(logits, ids, [position] * len(ids))
        asks = any(one.num_logprobs is not None for one in asked)
        assert crossings.awaited - before[0] == 1 + asks
        assert crossings.sent - before[1] == 1
        found.append(calls.counts - before[2])
    assert found[0] == found[1] and found[0].total() < 200


def test_more_rows_than_are_sampled_at_once() -> None:
    num = ROWS_AT_ONCE + 3
    params = [SamplingParams(100, top_k=3, presence_penalty=0.2, seed=i) for i in range(num)]
    rows = logits_of(0, num)
    ((*sampled,),) = run(params, [rows])
    for number in (0, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, num - 1):
        assert_is_the_hosts(sampled[number], params[number], [], rows[number])


def test_long_histories_and_requests_that_come_and_go() -> None:
    """Rooms grow, slots are used again, and a request that starts anew has what it had."""
    params = SamplingParams(100, temperature=0.0, frequency_penalty=0.6, repetition_penalty=1.2)
    sampler, generator = TorchSampler((EOS,), VOCAB), np.random.default_rng(0)
    outputs: dict[int, list[int]] = {}
    for step in range(60):
        if step < 40:
            long = generator.integers(0, VOCAB, 1500 if step == 25 else 10).tolist()
            outputs[step] = long
            sampler.start(start_of(step, params, long))
        if step % 5 == 4:
            gone = generator.choice(list(outputs))
            sampler.forget(RequestId(f"r{gone}"))
            del outputs[gone]
        again = generator.choice(list(outputs))
        sampler.start(start_of(again, params, outputs[again]))
        which = generator.permutation(list(outputs))[:12].tolist()
        rows = logits_of(step, len(which), 2)
        ids = [RequestId(f"r{number}") for number in which]
        positions = [len(outputs[number]) for number in which]
        sampled = sampler.sample(torch.from_numpy(rows.copy()), ids, positions)
        for number, row, found in zip(which, rows, sampled, strict=True):
            assert found.token_id == hosts_token(params, outputs[number], row).token_id
            outputs[number].append(found.token_id)


def test_where_everything_is_forbidden_only_allowed_tokens_hold() -> None:
    params = [
        SamplingParams(9, allowed_token_ids=TokenIds([4]), bad_words=((4,),), num_logprobs=0),
        SamplingParams(9, bad_words=tuple((token,) for token in range(VOCAB)), temperature=0.0),
        SamplingParams(
            9, allowed_token_ids=TokenIds([EOS, 4]), logit_bias=((4, -np.inf),), min_tokens=3
        ),
    ]
    rows = logits_of(0, len(params))
    (sampled,) = run(params, [rows])
    for one, row, found in zip(params, rows, sampled, strict=True):
        assert found.token_id is not None
        assert_is_the_hosts(found, one, [], row)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_row_that_cannot_be_sampled_ends_alone(bad: float, number: int) -> None:
    rows = logits_of(1, len(KINDS))
    expected = run(KINDS, [rows])[0]
    rows[number, 17] = bad
    sampled = run(KINDS, [rows])[0]
    assert sampled[number].token_id is None
    others = [i for i in range(len(KINDS)) if i != number]
    assert [sampled[i] for i in others] == [expected[i] for i in others]


def test_a_row_of_nothing_but_minus_infinity_ends_alone() -> None:
    rows = logits_of(1, len(KINDS))
    rows[1:4] = -np.inf
    sampled = run(KINDS, [rows])[0]
    assert [one.token_id is None for one in sampled] == [1 <= i < 4 for i in range(len(KINDS))]


def test_the_lowest_of_equals_wins() -> None:
    rows = np.zeros((2, VOCAB), dtype=np.float32)
    rows[1, [300, 20, 650]] = 4.0
    (sampled,) = run([SamplingParams(100, temperature=0.0)] * 2, [rows])
    assert [token.token_id for token in sampled] == [0, 20]


def test_a_request_that_is_not_known_gets_no_token() -> None:
    (token,) = TorchSampler((2,), VOCAB).sample(torch.zeros(1, VOCAB), [RequestId("?")], [0])
    assert token.token_id is None


def test_it_says_when_tokens_wait_for_what_the_host_asks_for_then() -> None:
    """A step that is asked for before would hold them up."""
    sampler = TorchSampler((EOS,), VOCAB)
    for number, params in enumerate(KINDS):
        sampler.start(start_of(number, params, []))
    found = []
    for number in range(len(KINDS)):
        take = sampler.ask(torch.from_numpy(logits_of(1, 1)), [RequestId(f"r{number}")], [0])
        found.append(sampler.waits_for_host)
        take()
    alone = [sampler.chooses_alone(params) or bool(params.bad_words) for params in KINDS]
    assert found == [not one for one in alone] and True in found
    sampler.ask(torch.from_numpy(logits_of(1, 2)), [RequestId("r0"), RequestId("r2")], [0, 0])()
    assert sampler.waits_for_host, "one of two"
