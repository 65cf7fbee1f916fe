"""What prompts of a workload have in common: from traces and generators to tokens."""

import json
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.errors import ConfigError
from kunserve.core.tokens import TokenIds
from kunserve_lab.bench.prompts import TokenIdPrompts, WordPrompts, prompt_of
from kunserve_lab.compare.simulated.prompts import Prompts
from kunserve_lab.workload import transform
from kunserve_lab.workload.contents import Content
from kunserve_lab.workload.files import WorkloadFileError
from kunserve_lab.workload.lengths import scale_lengths
from kunserve_lab.workload.multi_turn import Conversation, conversations
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.traces import read_timed_trace
from kunserve_lab.workload.workload import Lengths, Workload, WorkloadRequest

runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6)


def content(pairs: list[tuple[int, int]]) -> Content:
    return Content([name for name, _ in pairs], [size for _, size in pairs])


def num_common(one: TokenIds, other: TokenIds) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def expanded(one: Content) -> list[int]:
    return [name for name, size in one for _ in range(size)]


@given(runs, runs)
def test_simulated_prompts_begin_alike_as_far_as_their_runs_do(first, second):
    prompts = Prompts()
    made = []
    for number, one in enumerate((content(first), content(second))):
        request = WorkloadRequest(number, 0.0, one.num_tokens + 5, 1, one)
        made.append(prompts.of(request))
        assert len(made[-1]) == one.num_tokens + 5
    one, other = (TokenIds(expanded(content(pairs))) for pairs in (first, second))
    assert num_common(*made) == num_common(one, other)


@given(runs, st.floats(0.05, 3.0))
def test_scaling_keeps_beginnings(pairs, factor):
    whole = content(pairs)
    half = content(pairs[: (len(pairs) + 1) // 2])
    scaled, prefix = whole.scaled(factor), half.scaled(factor)
    assert scaled.num_tokens == round(whole.num_tokens * factor)
    assert expanded(scaled)[: prefix.num_tokens] == expanded(prefix)


def test_prompts_without_a_content_are_all_different():
    prompts = Prompts()
    one, other = (prompts.of(WorkloadRequest(number, 0.0, 9, 1)) for number in range(2))
    assert len(one) == 9 and num_common(one, other) == 0


def test_real_prompts_begin_alike_as_ids_and_as_words():
    contents = (content([(0, 20), (1, 10)]), content([(0, 20), (2, 10)]))
    requests = [WorkloadRequest(i, 0.0, 34, 1, one) for i, one in enumerate(contents)]
    ids = [prompt_of(TokenIdPrompts(0), request) for request in requests]
    assert all(len(one) == 34 for one in ids)
    assert ids[0][:20] == ids[1][:20] and ids[0][20] != ids[1][20]
    words = [prompt_of(WordPrompts(0), request).split() for request in requests]
    assert words[0][:20] == words[1][:20] and words[0] != words[1]


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def row(time_ms: int, tokens: int, hash_ids: object) -> dict[str, object]:
    return {
        "timestamp": time_ms, "input_length": tokens, "output_length": 3, "hash_ids": hash_ids,
    }  # fmt: skip


def test_mooncakes_hash_ids_are_blocks_of_512_tokens(tmp_path: Path):
    path = write(
        tmp_path / "trace.jsonl", row(0, 1100, [7, 8, 9]), row(5, 700, [7, 8]), row(9, 300, [1])
    )
    workload = read_timed_trace(path, 0.001)
    first, second, third = workload.requests()
    assert list(first.content) == [(7, 512), (8, 512), (9, 76)]
    assert list(second.content) == [(7, 512), (8, 188)]
    made = [Prompts().of(request) for request in (first,)]
    assert len(made[0]) == 1100
    prompts = Prompts()
    assert num_common(prompts.of(first), prompts.of(second)) == 700
    assert num_common(prompts.of(first), prompts.of(third)) == 0


@pytest.mark.parametrize("hash_ids", ["7", [1.5], [-1], [True], {"a": 1}, [1 << 60]])
def test_hash_ids_that_are_none_are_refused_with_their_line(tmp_path: Path, hash_ids: object):
    path = write(tmp_path / "trace.jsonl", row(0, 10, [1]), row(1, 10, hash_ids))
    with pytest.raises(WorkloadFileError, match="line 2: .*hash_ids"):
        read_timed_trace(path, 0.001)


def test_too_few_hash_ids_leave_the_rest_to_itself(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", row(0, 1500, [4]), row(1, 1500, [4]), row(2, 20, []))
    prompts = Prompts()
    one, other, short = (prompts.of(request) for request in read_timed_trace(path, 1).requests())
    assert num_common(one, other) == 512
    assert len(short) == 20


def test_transforms_keep_contents_with_their_requests():
    shape = Conversation(turns=3, system_tokens=20, turn_tokens=10, answer_tokens=30, think_s=5.0)
    workload = conversations(shape, 30, 2.0, seed=1)
    for changed in (
        transform.first(workload, 7),
        transform.thin(workload, 0.5, seed=3),
        transform.window(workload, 1.0, 9.0),
        transform.upscale(workload, 1.5, seed=2),
        transform.with_lengths(workload, scale_lengths(workload.lengths, 0.5)),
    ):
        for request in changed.requests():
            assert request.content is not None
            assert request.content.num_tokens == request.input_tokens


def test_a_trace_played_again_is_of_other_users():
    lengths = Lengths((5, 5), (1, 1), "told", (content([(1, 5)]), None)).take(5)
    assert lengths.contents[1::2] == (None, None)
    names = [next(iter(one))[0] for one in lengths.contents[::2]]
    assert len(set(names)) == 3 and names[0] == 1


def test_a_turn_is_what_was_said_before_and_something_new():
    shape = Conversation(turns=4, system_tokens=50, turn_tokens=10, answer_tokens=20, think_s=1.0)
    workload = conversations(shape, 40, 4.0, seed=0)
    assert len(workload) == 40 and workload.arrival_s == tuple(sorted(workload.arrival_s))
    prompts = Prompts()
    by_length: dict[int, list[TokenIds]] = {}
    for request in workload.requests():
        by_length.setdefault(request.input_tokens, []).append(prompts.of(request))
    assert sorted(by_length) == [60, 90, 120, 150]
    for shorter, longer in ((60, 90), (90, 120), (120, 150)):
        for prompt in by_length[longer]:
            assert any(num_common(prompt, before) == shorter for before in by_length[shorter])
    one, other = by_length[60][:2]
    assert num_common(one, other) == 50


def test_the_recipe_of_conversations():
    recipe = Recipe(Dataset.MULTI_TURN, num_prompts=20, conversation=Conversation(turns=5))
    workload = build_workload(recipe)
    assert len(workload) == 20 and build_workload(recipe) == workload
    assert "5 turns of 50 in, 100 out" in workload.provenance
    for wrong in (
        Recipe(Dataset.MULTI_TURN, request_rate=float("inf")),
        Recipe(Dataset.MULTI_TURN, burstiness=0.5),
        Recipe(Dataset.BURSTY, conversation=Conversation(turns=5)),
    ):
        with pytest.raises(ConfigError):
            build_workload(wrong)
    for fields in ({"turns": 0}, {"turn_tokens": 0}, {"think_s": float("nan")}):
        with pytest.raises(ConfigError):
            Conversation(**fields)


def test_a_workload_of_contents_is_a_value():
    contents = (content([(1, 4)]),)
    one, other = (Workload((0.0,), Lengths((4,), (1,), "x", contents), "y") for _ in range(2))
    assert one == other and hash(one) == hash(other)
