"""Parts of the output head give the very tokens that the whole head gives."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kunserve.core.ids import RequestId
from kunserve.core.layout import VocabRange
from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.engine.cpu.kernels.ops import Finish, linear, rms_norm
from kunserve.engine.cpu.logit_room import LogitRoom
from kunserve.engine.cpu.split_head import SplitHead, join_largest, join_logits, part_of
from kunserve.engine.sampling.sampler import Sampler, takes_largest
from tests.specs import model_spec

VOCAB, HIDDEN, EPS = 1000, 64, 1e-5
CUTS = ((0, 1000), (0, 512, 1000), (0, 16, 992, 1000), (0, 240, 256, 496, 1000))
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SEEDED = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.95, seed=7)


def weights_of(dtype: torch.dtype, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return SimpleNamespace(final_norm=torch.ones(HIDDEN, dtype=dtype), head=head)


def head_of(weights: Any) -> SplitHead:
    return SplitHead(model_spec(vocab_size=VOCAB, rms_eps=EPS), weights)


def parts_of(
    weights: Any, cuts: tuple[int, ...], rows: torch.Tensor, params: list[SamplingParams]
) -> list[tuple[int, np.ndarray]]:
    """What stages give that know all requests; every other part crosses a wire."""
    parts = []
    for number, (first, end) in enumerate(itertools.pairwise(cuts)):
        head = head_of(weights)
        for index, sampling in enumerate(params):
            head.start(SequenceStart(RequestId(str(index)), sampling, 1, ()))
        part = head.part(
            [RequestId(str(i)) for i in range(len(params))], VocabRange(first, end), rows
        )
        data = part if number % 2 else memoryview(np.asarray(part).tobytes())
        parts.append((first, part_of(data, len(rows))))
    return parts


def whole(weights: Any, rows: torch.Tensor) -> torch.Tensor:
    normed = rms_norm(rows, weights.final_norm, EPS)
    return linear(normed, weights.head, finish=Finish.FLOAT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_of_as_many_rows_as_were_reserved_takes_no_memory(dtype: torch.dtype) -> None:
    weights, rows = weights_of(dtype), torch.randn(7, HIDDEN).to(dtype)
    room = LogitRoom(VOCAB, HIDDEN * dtype.itemsize // 4)
    room.reserve(7)
    num_bytes, address = room.num_bytes, room.address
    head = SplitHead(model_spec(vocab_size=VOCAB, rms_eps=EPS), weights, room.part)
    head.start(SequenceStart(RequestId("0"), GREEDY, 1, ()))
    part = head.part([RequestId("0")], VocabRange(0, VOCAB), rows)
    assert np.array_equal(np.asarray(part)[:, 1], whole(weights, rows).argmax(dim=1).numpy())
    assert (room.num_bytes, room.address) == (num_bytes, address)
    assert num_bytes == 7 * (VOCAB * 4 + HIDDEN * dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 40])
@pytest.mark.parametrize("cuts", CUTS)
def test_joined_logits_have_the_bits_of_the_whole_head(
    dtype: torch.dtype, num_rows: int, cuts: tuple[int, ...]
) -> None:
    weights = weights_of(dtype)
    rows = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = rows.clone()
    parts = [part for _, part in parts_of(weights, cuts, rows, [SEEDED] * num_rows)]
    assert torch.equal(rows, before), "the rows are on their way to other stages too"
    assert torch.equal(join_logits(parts, range(num_rows)), whole(weights, rows))
    some = list(range(0, num_rows, 2))
    assert torch.equal(join_logits(parts, some), whole(weights, rows)[some])


def test_a_cap_of_logits_and_norms_with_an_offset_hold_in_parts_too() -> None:
    weights = weights_of(torch.float32)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    plain = whole(weights, rows)
    weights.final_norm -= 1.0
    spec = model_spec(vocab_size=VOCAB, rms_eps=EPS, logit_cap=2.0, has_offset_norms=True)
    for sampling in (SEEDED, GREEDY):
        head, id_ = SplitHead(spec, weights), RequestId("0")
        head.start(SequenceStart(id_, sampling, 1, ()))
        part = head.part([id_], VocabRange(240, 500), rows)
        wanted = 2.0 * torch.tanh(plain[:, 240:500] / 2.0)
        if sampling is GREEDY:
            wanted = torch.stack((wanted.amax(dim=1), wanted.argmax(dim=1) + 240.0), dim=1)
        torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cuts", CUTS)
def test_the_largest_logits_of_parts_give_the_token_of_the_whole_head(
    cuts: tuple[int, ...],
) -> None:
    weights = weights_of(torch.float32)
    weights.head[700] = weights.head[3]  # equal logits: the lowest token wins
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2))
    rows[0] = weights.head[3]
    parts = parts_of(weights, cuts, rows, [GREEDY] * 6)
    assert all(part.shape == (6, 2) for _, part in parts)
    values, tokens = join_largest(parts, range(6), 6)
    logits = whole(weights, rows).numpy()
    assert tokens == logits.argmax(axis=1).tolist() and tokens[0] == 3
    assert values == logits.max(axis=1).tolist()


def test_a_stage_that_has_forgotten_a_skipped_request_gives_more_than_is_needed() -> None:
    weights = weights_of(torch.float32)
    rows = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(3))
    brief = parts_of(weights, (0, 512), rows, [GREEDY, GREEDY])
    more = parts_of(weights, (512, VOCAB), rows, [GREEDY, SEEDED])
    assert more[0][1].shape == (2, VOCAB - 512)
    _, tokens = join_largest([*brief, *more], [0], 2)
    assert tokens == whole(weights, rows).numpy()[:1].argmax(axis=1).tolist()


def test_a_row_that_is_not_finite_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    weights = weights_of(torch.float32)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    rows[1] = torch.nan
    parts = parts_of(weights, (0, 512, VOCAB), rows, [GREEDY] * 3)
    values, tokens = join_largest(parts, range(3), 3)
    sampler = Sampler([], VOCAB)
    names = [RequestId(str(i)) for i in range(3)]
    for name in names[:2]:
        sampler.start(SequenceStart(name, GREEDY, 1, ()))
    found = sampler.sample_largest(values, tokens, names)
    assert found[0].token_id == whole(weights, rows)[0].argmax().item()
    assert found[1].token_id is None, "no finite logit"
    assert found[2].token_id is None, "never started"
    assert "request=1" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.0},
        {"num_logprobs": 0},
        {"min_tokens": 1},
        {"logit_bias": ((3, 1.0),)},
        {"presence_penalty": 0.5},
        {"allowed_token_ids": (1, 2)},
    ],
)
def test_who_needs_more_than_the_largest_logit(change: dict[str, Any]) -> None:
    assert takes_largest(GREEDY)
    assert not takes_largest(SamplingParams(**({"max_tokens": 9, "temperature": 0.0} | change)))
