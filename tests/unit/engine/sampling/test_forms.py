"""Structured outputs in the sampler: tokens stay in the form, whatever else a request wishes."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits, LLTokenizer

from kunserve.control.group.sequence import make_sequence
from kunserve.core.ids import RequestId
from kunserve.core.request import (
    FinishReason,
    ReasoningMarks,
    Request,
    SamplingParams,
    StructuredOutput,
)
from kunserve.core.step import LATE, SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.sampling.sampler import Sampler, takes_largest
from kunserve.engine.sampling.structured import forms as forms_module
from kunserve.engine.sampling.structured import grammar
from kunserve.engine.sampling.structured.forms import Form, Forms, MaskLate
from kunserve.engine.sampling.structured.grammar import FormError, compile_form
from kunserve.engine.sampling.structured.vocabulary import open_vocabulary
from kunserve_extras.torch_body.sampler import TorchSampler
from tests.examples import examples
from tests.tiny_models import VOCAB, save_tokenizer

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutput("json_schema", json.dumps(PERSON)),
    "regex": StructuredOutput("regex", "[a-e]{2,6}(-[0-9]+)?"),
    "choice": StructuredOutput("choice", '["the other", "the", "an 12", ""]'),
    "grammar": StructuredOutput("grammar", 'root ::= "(" root ")" | "x" | "yy"'),
}

A, B = 67, 68
MANY_STATES = StructuredOutput("regex", "[ab]*a[ab]{14}c")
"""Its lexer remembers the last fifteen letters."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    save_tokenizer(folder)
    return open_vocabulary((folder / "tokenizer.json").read_text(), VOCAB, [EOS])


@pytest.fixture(scope="module")
def forms(vocabulary: LLTokenizer) -> Iterator[Forms]:
    made = Forms(lambda: vocabulary)
    yield made
    made.close()


def rows(seed: int, position: int) -> np.ndarray:
    return np.random.default_rng((seed, position)).normal(0, 2, (1, VOCAB)).astype(np.float32)


def start(sampling: SamplingParams, output: Sequence[int] = ()) -> SequenceStart:
    return SequenceStart(RequestId("r"), sampling, 3, TokenIds([5, 6, 7, *output]))


def sample_all(
    sampler: Sampler, logits: np.ndarray, names: Sequence[RequestId], positions: Sequence[int]
) -> list[int | None]:
    """The tokens of rows [n, vocab], as steps give them: who is late is asked for again."""
    tokens: list[int | None] = [LATE] * len(names)
    while late := [i for i, token in enumerate(tokens) if token == LATE]:
        some = torch.from_numpy(logits[late].copy())
        found = sampler.sample(some, [names[i] for i in late], [positions[i] for i in late])
        for i, token in zip(late, found, strict=True):
            tokens[i] = token.token_id
    return tokens


def mask_of(form: Form) -> np.ndarray:
    """The mask, once it is there."""
    while True:
        with contextlib.suppress(MaskLate):
            return form.mask()


def generate(
    sampler: Sampler, sampling: SamplingParams, seed: int, restarts: Sequence[int] = ()
) -> tuple[list[int], FinishReason | None]:
    """An output as the scheduler ends it; at some positions the sampler starts anew."""
    request = Request(RequestId("r"), TokenIds([5, 6, 7]), sampling, 0.0)
    sequence = make_sequence(request, TokenIds(()), 0, frozenset({EOS}), 1000, 16)
    sampler.start(start(sampling))
    for position in range(sampling.max_tokens):
        if position in restarts:
            sampler.start(start(sampling, sequence.output_token_ids))
        (token,) = sample_all(sampler, rows(seed, position), [RequestId("r")], [position])
        told = sequence.append_token(token, None, 10_000, 0.0)
        if told.finish_reason is not None:
            return sequence.output_token_ids, told.finish_reason
    raise AssertionError("not ended")


def fits(form: StructuredOutput, text: str) -> bool:
    match form.kind:
        case "json_schema":
            value = json.loads(text)
            return (
                set(value) - {"tags"} == {"name", "age"}
                and len(value["name"]) <= 6
                and 0 <= value["age"] <= 150
                and set(value.get("tags", [])) <= {"a", "bb"}
            )
        case "regex":
            return re.fullmatch(form.text, text) is not None
        case "choice":
            return text in json.loads(form.text)
    inner = text.strip("()")
    return inner in ("x", "yy") and text == "(" * text.count("(") + inner + ")" * text.count("(")


OPENS, CLOSES = 150, 151
MARKS = (
    None,
    ReasoningMarks(OPENS, CLOSES, is_open=True),
    ReasoningMarks(OPENS, CLOSES, is_open=False),
)


def behind_reasoning(tokens: list[int], marks: ReasoningMarks | None) -> list[int] | None:
    """What is of the form; None if the reasoning before it has no end."""
    if marks is None or not (marks.is_open or tokens[0] == OPENS):
        return tokens
    return tokens[tokens.index(CLOSES) + 1 :] if CLOSES in tokens else None


WISHES = st.builds(
    SamplingParams,
    max_tokens=st.just(90),
    temperature=st.sampled_from([0.0, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.5]),
    top_k=st.sampled_from([None, 3]),
    seed=st.integers(0, 100),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 3, 60]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((EOS, 5.0), (9, 100.0), (VOCAB - 1, 100.0))]),
    bad_words=st.sampled_from([(), ((EOS,),), ((70, 71), (40,))]),
    structured=st.sampled_from(list(FORMS.values())),
)


@settings(max_examples=examples(25))
@given(
    WISHES,
    st.sampled_from(MARKS),
    st.integers(0, 1000),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_an_output_that_ends_by_itself_has_its_form(
    forms: Forms,
    vocabulary: LLTokenizer,
    sampling: SamplingParams,
    marks: ReasoningMarks | None,
    seed: int,
    restarts: list[int],
) -> None:
    assert sampling.structured is not None
    sampling = replace(sampling, structured=replace(sampling.structured, after=marks))
    tokens, reason = generate(Sampler([EOS], VOCAB, forms), sampling, seed)
    assert (tokens, reason) == generate(Sampler([EOS], VOCAB, forms), sampling, seed, restarts)
    if sampling.temperature == 0.0:
        assert (tokens, reason) == generate(TorchSampler([EOS], VOCAB, forms), sampling, seed)
    of_form = behind_reasoning(tokens, marks)
    if of_form is None:
        return
    text = vocabulary.decode_str([token for token in of_form if token != EOS])
    if reason is FinishReason.STOP:
        assert tokens[-1] == EOS and fits(sampling.structured, text), text
    else:
        assert reason is FinishReason.LENGTH and len(tokens) == 90
        matcher = compile_form(vocabulary, sampling.structured)
        assert matcher.consume_tokens(of_form), "a beginning of the form"


def test_a_model_may_think_before_the_form(forms: Forms, vocabulary: LLTokenizer) -> None:
    def said(bias: int, *marks: ReasoningMarks | None) -> str:
        form = StructuredOutput("regex", "[0-9]{4}", *marks)
        sampling = SamplingParams(40, temperature=0.0, structured=form, logit_bias=((bias, 9.0),))
        tokens, _ = generate(Sampler([EOS], VOCAB, forms), sampling, 3)
        return " ".join("<>"[token - OPENS] if token >= OPENS else "x" for token in tokens)

    assert said(OPENS) == "x x x x x", "four digits and the end"
    assert said(CLOSES, MARKS[1]) == "> x x x x x", "thinks at once, and ends that at once"
    assert said(CLOSES, MARKS[2]) == "x x x x x", "what was not opened is not closed"
    assert said(OPENS, MARKS[2]).startswith("< <"), "what was opened may go on"


def test_wishes_hold_as_far_as_the_form_allows(forms: Forms, vocabulary: LLTokenizer) -> None:
    def said(**wishes: object) -> str:
        sampling = SamplingParams(40, temperature=0.0, **wishes)  # type: ignore[arg-type]
        tokens, reason = generate(Sampler([EOS], VOCAB, forms), sampling, 3)
        assert reason is FinishReason.STOP
        return vocabulary.decode_str(tokens[:-1])

    digits = StructuredOutput("regex", "[0-9]{1,30}")
    eager = ((EOS, 50.0),)
    assert len(said(structured=digits, logit_bias=eager)) == 1
    assert len(said(structured=digits, logit_bias=eager, min_tokens=20)) >= 20
    assert len(said(structured=digits, logit_bias=eager, ignore_eos=True)) == 30
    assert len(said(structured=digits, min_tokens=39)) == 30, "the form ends before"
    assert said(structured=FORMS["choice"], stop_token_ids=(EOS, 4)) in json.loads(
        FORMS["choice"].text
    )


def test_a_stop_token_of_the_form_ends_the_output(forms: Forms, vocabulary: LLTokenizer) -> None:
    (seven,) = vocabulary.tokenize_str("7")
    form = StructuredOutput("regex", "7{5}")
    sampling = SamplingParams(40, temperature=0.0, structured=form, stop_token_ids=(seven,))
    assert generate(Sampler([EOS], VOCAB, forms), sampling, 0) == ([seven], FinishReason.STOP)


def test_only_whole_logits_tell_what_a_form_allows() -> None:
    assert takes_largest(SamplingParams(4, temperature=0.0))
    structured = SamplingParams(4, temperature=0.0, structured=FORMS["json"])
    assert not takes_largest(structured) and structured.needs_history


def test_a_form_without_a_token_left_ends_its_request_alone(
    forms: Forms, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the client has excluded everything, or the form cannot be used at all."""
    sampler = Sampler([EOS], VOCAB, forms)
    digits = StructuredOutput("regex", "[0-9]{3}")
    many = {
        "excluded": SamplingParams(9, structured=digits, allowed_token_ids=TokenIds([70])),
        "broken": SamplingParams(9, structured=StructuredOutput("regex", "(")),
        "whole": SamplingParams(9, temperature=0.0, structured=digits),
        "plain": SamplingParams(9, temperature=0.0),
    }
    for name, sampling in many.items():
        sampler.start(SequenceStart(RequestId(name), sampling, 1, TokenIds([5])))
    logits = np.repeat(rows(1, 0), len(many), axis=0)
    tokens = sample_all(sampler, logits, [RequestId(name) for name in many], [0] * len(many))
    assert [token is None for token in tokens] == [True, True, False, False]
    assert "request=broken ends" in caplog.text and "request=excluded ends" in caplog.text


def test_history_that_leaves_the_form_ends_the_request(forms: Forms) -> None:
    sampler = Sampler([EOS], VOCAB, forms)
    sampler.start(start(SamplingParams(9, structured=FORMS["regex"]), output=[EOS + 1]))
    logits = np.zeros((1, VOCAB), np.float32)
    assert sample_all(sampler, logits, [RequestId("r")], [1]) == [None]


OTHER = FORMS["choice"]


def held(forms: Forms, form: StructuredOutput) -> threading.Event:
    """Until it is set, the thread that has the form's jobs is at one of them."""
    gate = threading.Event()
    forms.submit(form, lambda: gate.wait(60) and None)
    return gate


def begun(sampler: Sampler, wanted: dict[str, StructuredOutput]) -> list[RequestId]:
    """Requests that have these forms."""
    names = [RequestId(name) for name in wanted]
    for name, form in zip(names, wanted.values(), strict=True):
        sampling = SamplingParams(9, temperature=0.0, structured=form)
        sampler.start(SequenceStart(name, sampling, 1, TokenIds([5])))
    return names


def make_known(forms: Forms, form: StructuredOutput) -> None:
    """Outputs of the form have been quick, and what compiling it took is forgotten."""
    for _ in range(12):
        mask_of(forms.start(form, ()))


def test_a_slow_form_holds_up_nobody_else(vocabulary: LLTokenizer) -> None:
    """Its row has no token yet; a later step asks again. Nor is a plain request held up."""
    forms = Forms(lambda: vocabulary)
    make_known(forms, OTHER)
    gate = held(forms, FORMS["regex"])
    sampler = Sampler([EOS], VOCAB, forms)
    names = begun(sampler, {"slow": FORMS["regex"], "other": OTHER})
    sampler.start(SequenceStart(RequestId("plain"), SamplingParams(9), 1, TokenIds([5])))
    names.append(RequestId("plain"))
    for _ in range(3):
        sampled = sample_all(sampler, np.zeros((2, VOCAB), np.float32), names[1:], [0, 0])
        assert None not in sampled and LATE not in sampled
        (late,) = sampler.sample(torch.zeros(1, VOCAB), names[:1], [0])
        assert late.token_id == LATE
        begun(sampler, {"other": OTHER})
    gate.set()
    assert sample_all(sampler, np.zeros((1, VOCAB), np.float32), names[:1], [0])[0] > 0
    forms.close()


def test_a_step_waits_once_for_all_that_is_late(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms, waits = Forms(lambda: vocabulary), []
    gate = held(forms, FORMS["regex"])
    sampler = Sampler([EOS], VOCAB, forms)
    names = begun(sampler, {str(number): FORMS["regex"] for number in range(4)})
    plain = threading.Event.wait

    def counting(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
        return plain(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", counting)
    monkeypatch.setattr(forms_module, "MOST_HOLD_S", 0.05)
    for _ in range(2):  # each step has time of its own
        waits.clear()
        sampled = sampler.sample(torch.zeros(4, VOCAB), names, [0] * 4)
        assert [token.token_id for token in sampled] == [LATE] * 4
        assert waits[0] == pytest.approx(0.05, abs=0.001) and sum(waits[1:]) < 0.01
    gate.set()
    forms.close()


def test_a_mask_that_never_comes_ends_its_form_and_no_other(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for the stuck thread with another form goes on in a new one."""
    forms = Forms(lambda: vocabulary)
    gate = held(forms, FORMS["regex"])
    sampler = Sampler([EOS], VOCAB, forms)
    names = begun(sampler, {"stuck": FORMS["regex"], "same": FORMS["regex"], "behind": OTHER})
    monkeypatch.setattr(forms_module, "MAX_WAIT_S", 0.001)
    stuck, same = sampler.sample(torch.zeros(2, VOCAB), names[:2], [0, 0])
    assert (stuck.token_id, same.token_id) == (None, None)
    assert "no mask within" in caplog.text and "another output of this form" in caplog.text
    monkeypatch.undo()
    assert sample_all(sampler, np.zeros((1, VOCAB), np.float32), names[2:], [0])[0] > 0
    begun(sampler, {"stuck": FORMS["regex"]})
    assert sample_all(sampler, np.zeros((1, VOCAB), np.float32), names[:1], [0])[0] > 0
    gate.set()
    forms.close()


def test_who_has_gone_costs_nothing_more(vocabulary: LLTokenizer) -> None:
    forms, asked = Forms(lambda: vocabulary), []
    gate = held(forms, FORMS["regex"])
    sampler = Sampler([EOS], VOCAB, forms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms_module, "compile_form", lambda *args: asked.append(args[1]))
        names = begun(sampler, {"gone": FORMS["regex"]})
        sampler.forget(names[0])
        last = threading.Event()
        forms.submit(FORMS["regex"], last.set)
        gate.set()
        assert last.wait(30) and not asked
    forms.close()


def test_a_form_outlives_the_states_that_its_requests_spend_together(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lexer is shared, and never forgets a state; each output has the tokens it would have."""
    long = ((A, 50.0), (B, 50.0))
    sampling = SamplingParams(60, temperature=0.0, structured=MANY_STATES, logit_bias=long)

    def limited(max_states: int) -> tuple[list[list[int | None]], int]:
        compiled = 0

        def counting(*asked: object) -> object:
            nonlocal compiled
            compiled += 1
            return compile_form(*asked)  # type: ignore[arg-type]

        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        monkeypatch.setattr(grammar, "limits", lambda: limits)
        monkeypatch.setattr(forms_module, "compile_form", counting)
        forms = Forms(lambda: vocabulary)
        sampler, outputs = Sampler([EOS], VOCAB, forms), []
        for seed in range(0, 15, 3):
            names = [RequestId(f"{seed}-{i}") for i in range(3)]
            for name in names:
                sampler.start(SequenceStart(name, sampling, 1, TokenIds([5])))
            for position in range(sampling.max_tokens):
                logits = np.concatenate([rows(seed + i, position) for i in range(3)])
                outputs.append(sample_all(sampler, logits, names, [position] * 3))
        forms.close()
        return outputs, compiled

    outputs, compiled = limited(1_000)
    assert compiled > 1, "no lexer was spent"
    assert (outputs, 1) == limited(50_000)
    assert all(token is not None for tokens in outputs for token in tokens)


def test_what_fails_with_a_lexer_of_its_own_fails(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(grammar, "limits", lambda: limits)
    forms = Forms(lambda: vocabulary)
    form = forms.start(MANY_STATES, ())
    with pytest.raises(FormError, match="too many"):
        for position in range(200):
            form.append(max(A, B, key=lambda token: float(rows(1, position)[0, token])))
            mask_of(form)
    forms.close()


def test_compiled_forms_are_kept_and_bounded(vocabulary: LLTokenizer) -> None:
    compiled: list[str] = []
    forms = Forms(lambda: vocabulary)
    plain = forms_module.compile_form

    def counting(vocabulary: LLTokenizer, form: StructuredOutput) -> object:
        compiled.append(form.text)
        return plain(vocabulary, form)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms_module, "compile_form", counting)
        for text in ("a", "b", "a", *map(str, range(forms_module.MAX_COMPILED)), "a"):
            forms.prepare(StructuredOutput("regex", text))
            mask_of(forms.start(StructuredOutput("regex", text), ()))
    assert compiled.count("a") == 2 and compiled.count("b") == compiled.count("3") == 1
    forms.close()


def test_without_an_end_there_are_no_forms(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(FormError, match="no token that ends"):
        open_vocabulary((tmp_path / "tokenizer.json").read_text(), VOCAB, [])
    with pytest.raises(FormError, match="cannot be used"):
        open_vocabulary("{}", VOCAB, [EOS])


@pytest.mark.parametrize("choice", ["a b", "a\nb", 'q"uo\\te', "", "/x/", "{x}", "a|b", "\t"])
def test_choices_are_taken_as_they_are(vocabulary: LLTokenizer, choice: str) -> None:
    matcher = compile_form(vocabulary, StructuredOutput("choice", json.dumps([choice, "zz"])))
    if choice != "\t":  # which no token of this vocabulary has
        assert matcher.consume_tokens(vocabulary.tokenize_str(choice)) and matcher.is_accepting()


def test_white_space_of_json_has_an_end(vocabulary: LLTokenizer) -> None:
    form = StructuredOutput("json_object", "")
    spaces = compile_form(vocabulary, form)
    assert spaces.consume_tokens(vocabulary.tokenize_str('{ "a":\n    1 }'))
    many = vocabulary.tokenize_str("{" + " " * 30)
    assert compile_form(vocabulary, form).try_consume_tokens(many) < len(many)
