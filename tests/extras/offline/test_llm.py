import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kunserve import LLM, SamplingParams, StructuredOutputsParams
from kunserve.core.errors import ConfigError, InvalidRequest, PromptTooLong, Unavailable
from kunserve.model.generation_config import SamplingDefaults
from tests.conftest import wait_until
from tests.extras.offline.echo_llm import echo_llm
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine(eos_token_id=EOS)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, engine: EchoEngine) -> Iterator[LLM]:
    with echo_llm(monkeypatch, engine) as one:
        yield one


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "kunserve"]


def test_a_batch_in_order_in_every_spelling(llm: LLM, engine: EchoEngine) -> None:
    prompts: list[Any] = [
        "hello world",
        ids("fox"),
        {"prompt": "Paris"},
        {"prompt_token_ids": [7, 8]},
        *(f"number {i}" for i in range(30)),
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3))
    assert [one.prompt for one in outputs[:4]] == ["hello world", None, "Paris", None]
    assert [one.prompt for one in outputs[4:]] == prompts[4:]
    for output in outputs:
        (answer,) = output.outputs
        given = output.prompt_token_ids
        assert answer.token_ids == (given * 3)[:3]
        assert answer.text == tiny_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert answer.logprobs is answer.cumulative_logprob is output.prompt_logprobs is None
    assert len({one.request_id for one in outputs}) == len(prompts)
    assert llm.generate("hello")[0].outputs[0].finish_reason == "length"
    assert len(llm.generate([5, 6], SamplingParams(max_tokens=None))[0].outputs[0].token_ids) == 510
    assert llm.generate([]) == []
    assert not engine.tasks


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, temperature=0)
    (output,) = llm.generate([[5, 6, 7]], params)
    first, *others = output.prompt_logprobs or []
    assert first is None
    assert [one[token].logprob for one, token in zip(others, [6, 7], strict=True)] == [-1.0, -2.0]
    assert others[0][6].rank == 2 and others[0][0].rank == 1
    (answer,) = output.outputs
    assert answer.cumulative_logprob == -1.0
    assert [next(iter(one)) for one in answer.logprobs or []] == answer.token_ids == [5, 6]
    told = (answer.logprobs or [])[0]
    assert len(told) == 2 and told[5].rank == 1
    assert told[5].decoded_token == tiny_tokenizer().decode([5])


def test_several_answers_and_parameters_for_each_prompt(llm: LLM, engine: EchoEngine) -> None:
    params = [SamplingParams(n=2, seed=3, max_tokens=1), SamplingParams(n=1, seed=3, max_tokens=2)]
    first, second = llm.generate(["hello", "fox"], params)
    assert [one.index for one in first.outputs] == [0, 1] and len(second.outputs) == 1
    seeds = {one.request_id: one.sampling.seed for one in engine.submitted}
    assert len(set(seeds.values())) == 2  # both begin with the one that was given
    with pytest.raises(ValueError, match="2 prompts, and 1 sampling"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_a_priority_for_all_or_for_each(
    monkeypatch: pytest.MonkeyPatch, engine: EchoEngine
) -> None:
    few = SamplingParams(max_tokens=1)
    with echo_llm(monkeypatch, engine, scheduling_policy="priority") as llm:
        prompts = [[number] for number in range(1, 21)]
        outputs = llm.generate(prompts, few, priority=range(20, 0, -1))
        assert [one.prompt_token_ids for one in outputs] == prompts
        # More wait than the engine is given at once, so the order begins here.
        assert [one.priority for one in engine.submitted] == [*range(1, 21)]
        engine.submitted.clear()
        llm.generate(["hello", "fox"], few, priority=-3)
        llm.chat([{"role": "user", "content": "hello"}], few, priority=[5])
        llm.generate("hello", few)
        assert [one.priority for one in engine.submitted] == [-3, -3, 5, 0]
        for wrong in ([1], "12", 1 << 64, [1, "x"], 1.5):
            with pytest.raises(ValueError, match="priorit"):
                llm.generate(["a", "b"], few, priority=wrong)  # type: ignore[arg-type]
    with echo_llm(monkeypatch, engine) as llm, pytest.raises(ValueError, match="scheduling-policy"):
        llm.generate("hello", few, priority=1)


def test_what_the_makers_recommend(monkeypatch: pytest.MonkeyPatch, engine: EchoEngine) -> None:
    recommended = SamplingDefaults(temperature=0.3, top_k=7, max_new_tokens=40)
    with echo_llm(monkeypatch, engine, recommended) as llm:
        llm.generate("hello")
        llm.generate("hello", SamplingParams())
        llm.generate("hello", llm.get_default_sampling_params())
    found = [(one.sampling.temperature, one.sampling.top_k) for one in engine.submitted]
    assert found == [(0.3, 7), (1.0, None), (0.3, 7)]
    assert [one.sampling.max_tokens for one in engine.submitted] == [40, 16, 40]


def test_without_parameters_a_prompt_gets_what_has_room(
    monkeypatch: pytest.MonkeyPatch, engine: EchoEngine
) -> None:
    prompts = [[7] * 500, [7] * 480, [7, 8]]
    for recommended, lengths in ((None, [12, 16, 16]), (2048, [12, 32, 510])):
        engine.submitted.clear()
        defaults = SamplingDefaults(max_new_tokens=recommended)
        with echo_llm(monkeypatch, engine, defaults) as llm:
            llm.generate(prompts)
        assert sorted(one.sampling.max_tokens for one in engine.submitted) == lengths
    with echo_llm(monkeypatch, engine) as llm, pytest.raises(PromptTooLong, match="600 in the p"):
        llm.generate([[7] * 600])


def test_text_ends_an_answer(llm: LLM, engine: EchoEngine) -> None:
    engine.script = lambda _: [*ids("one two three four"), EOS]
    stop = SamplingParams(max_tokens=50, stop="three")
    (answer,) = llm.generate("x", stop)[0].outputs
    assert (answer.text, answer.stop_reason) == ("one two ", "three")
    (answer,) = llm.generate("x", SamplingParams(max_tokens=50))[0].outputs
    assert answer.token_ids[-1] == EOS and answer.text == "one two three four"
    silent = SamplingParams(max_tokens=50, detokenize=False, logprobs=0)
    (answer,) = llm.generate("x", silent)[0].outputs
    assert answer.text == "" and len(answer.token_ids) > 4
    assert answer.logprobs is not None
    assert answer.logprobs[0][answer.token_ids[0]].decoded_token is None


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (["a", [1] * 600], SamplingParams(), "prompt 1: This model's maximum context length"),
        (["a", "b"], SamplingParams(stop_token_ids=[999]), "prompt 0: .*stop_token_ids"),
        (["a", ""], SamplingParams(), "prompt 1: .*empty"),
        (["a", []], SamplingParams(), r"`prompts`\[1\] is empty"),
        (["a", 7], SamplingParams(), r"`prompts`\[1\] must be a text"),
        ([[1, 999]], SamplingParams(), "outside the vocabulary"),
        (7, SamplingParams(), "not int"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, SamplingParams(), "multi_modal_data"),
        (["a"], SamplingParams(n=200), "`n` may be at most"),
        (["a"], "hot", "must be SamplingParams"),
    ],
)
def test_what_is_wrong_raises_before_anything_runs(
    llm: LLM, engine: EchoEngine, prompts: Any, params: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        llm.generate(prompts, params)
    assert isinstance(raised.value, InvalidRequest)
    assert not engine.submitted
    assert llm.generate("fine")


def test_a_long_prompt_may_be_cut(llm: LLM) -> None:
    numbers = [i % 200 for i in range(600)]
    with pytest.raises(PromptTooLong):
        llm.generate([numbers])
    cut = SamplingParams(max_tokens=4, truncate_prompt_tokens=-1)
    assert llm.generate([numbers], cut)[0].prompt_token_ids == numbers[-508:]
    few = SamplingParams(max_tokens=4, truncate_prompt_tokens=2)
    (output,) = llm.generate("hello world", few)
    assert output.prompt_token_ids == ids("hello world")[-2:]
    assert output.prompt == tiny_tokenizer().decode(output.prompt_token_ids)


def test_what_was_cached_and_for_whom(llm: LLM, engine: EchoEngine) -> None:
    engine.num_cached = 16
    prompts = [{"prompt": "hello", "cache_salt": "tenant"}, {"prompt": "hello"}]
    outputs = llm.generate(prompts)
    assert [one.num_cached_tokens for one in outputs] == [16, 16]
    assert {one.cache_salt for one in engine.submitted} == {"tenant", ""}
    assert llm.reset_prefix_cache() and engine.num_cached == 0
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate({"prompt": "hello", "cache_salt": "a/b"})


def test_forms(llm: LLM, engine: EchoEngine) -> None:
    forms: list[dict[str, Any]] = [
        {"json": {"type": "object"}},
        {"regex": "a+"},
        {"choice": ["yes", "no"]},
        {"json_object": True},
    ]
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(**one)) for one in forms]
    assert len(llm.generate(["x"] * 4, params)) == 4
    asked = [one.sampling.structured for one in engine.submitted]
    kinds = ["json_schema", "regex", "choice", "json_object"]
    assert [one and one.kind for one in asked] == kinds
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match="prompt 1: .*cannot be compiled"):
        llm.generate(["x", "y"], [SamplingParams(), wrong])
    assert len(engine.submitted) == 4


def test_conversations(llm: LLM, engine: EchoEngine) -> None:
    ask = [{"role": "user", "content": "Rain?"}]
    (one,) = llm.chat(ask, SamplingParams(max_tokens=1))
    assert one.prompt == "<|start|>user\nRain?<|end|>\n<|start|>assistant\n"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    two = llm.chat([ask, [*ask, {"role": "assistant", "content": "Well"}]], tools=tools)
    assert [one.prompt.count("<|start|>tools") for one in two if one.prompt] == [1, 1]
    told = [*ask, {"role": "assistant", "content": "Well, "}]
    (one,) = llm.chat(told, continue_final_message=True)
    assert one.prompt is not None and one.prompt.endswith("Well, ")
    for wrong in ([], "hello", [["hello"]], [[]], [{"content": "x"}]):
        with pytest.raises(InvalidRequest):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_variables_of_the_template(monkeypatch: pytest.MonkeyPatch, engine: EchoEngine) -> None:
    given = {"tools": [{"name": "weather"}]}
    with echo_llm(monkeypatch, engine, default_chat_template_kwargs=given) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Rain?"}])
    assert output.prompt is not None and output.prompt.startswith("<|start|>tools\n")


class Bar:
    """What ``tqdm`` is called with, and what it is told."""

    def __init__(self, total: int, desc: str, **_: Any) -> None:
        self.total, self.done, self.closed, self.postfix = total, 0, False, ""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfix = text

    def update(self, num: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.done += num

    def close(self) -> None:
        self.closed = True


def test_a_bar_where_there_is_a_terminal_or_somebody_asks(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Bar] = []
    llm.generate(["a", "b", "c"], use_tqdm=lambda **given: bars.append(Bar(**given)) or bars[-1])
    assert (bars[0].total, bars[0].done, bars[0].closed) == (3, 3, True)
    assert "tokens/s" in bars[0].postfix
    llm.generate(["a", "b"])
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    llm.generate(["a", "b"])
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_inside_a_running_loop(llm: LLM) -> None:
    async def notebook() -> int:
        return len(llm.generate(["a", "b"]))

    assert asyncio.run(notebook()) == 2


def test_several_threads(llm: LLM) -> None:
    def work(number: int) -> bool:
        prompts = [f"{number} {i}" for i in range(10)]
        return [one.prompt for one in llm.generate(prompts)] == prompts

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_no_more_than_fills_the_batches_twice_is_under_way(llm: LLM, engine: EchoEngine) -> None:
    engine.held = True
    threading.Thread(
        target=lambda: (wait_until(lambda: engine.submitted), setattr(engine, "held", False))
    ).start()
    at_most = 0

    def refusal(_: Any) -> None:
        nonlocal at_most
        at_most = max(at_most, len(engine.tasks) + 1)

    engine.refusal = refusal
    assert len(llm.generate([f"{i}" for i in range(50)])) == 50
    assert at_most == 8


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["ctrl-c", "error"])
def test_an_interrupted_call_leaves_nothing_running(llm: LLM, engine: EchoEngine, how: str) -> None:
    engine.hold_after = 1

    class Trouble(Exception):
        pass

    def bar(**_: Any) -> Any:
        raise Trouble

    def interrupt() -> None:
        main = threading.main_thread().ident
        assert main is not None
        try:
            wait_until(lambda: len(engine.tasks) == 3)
        finally:  # or the call would go on for ever
            signal.pthread_kill(main, signal.SIGINT)

    if how == "ctrl-c":
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"])
    else:
        engine.hold_after = None
        with pytest.raises(Trouble):
            llm.generate(["a", "b", "c"], use_tqdm=bar)
    assert not engine.tasks
    engine.hold_after = None
    assert len(llm.generate(["a", "b"])) == 2


def test_the_engine_gives_up_on_one(llm: LLM, engine: EchoEngine) -> None:
    engine.fail_after = 3
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5, prompt_logprobs=0)]
    whole, given_up = (one.outputs[0] for one in llm.generate([[8], [9]], params))
    assert (whole.finish_reason, whole.token_ids) == ("length", [8] * 3)
    assert (given_up.finish_reason, given_up.token_ids) == ("error", [9] * 3)


def test_prompts_wait_while_no_instance_is_alive(llm: LLM, engine: EchoEngine) -> None:
    until_s = time.monotonic() + 0.15

    def refusal(_: Any) -> Exception | None:
        return Unavailable("no instance") if time.monotonic() < until_s else None

    engine.refusal = refusal
    assert len(llm.generate(["a", "b"])) == 2


def test_the_end(monkeypatch: pytest.MonkeyPatch, engine: EchoEngine) -> None:
    closed = []

    async def close() -> None:
        closed.append(1)

    engine.close = close  # type: ignore[method-assign]
    llm = echo_llm(monkeypatch, engine)
    assert threads() == ["kunserve"]
    llm.close()
    llm.close()
    assert threads() == [] and closed == [1]
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("a")
    forgotten = echo_llm(monkeypatch, engine)
    del forgotten
    gc.collect()
    assert threads() == [] and closed == [1, 1]


def test_closing_ends_the_calls_of_other_threads(
    monkeypatch: pytest.MonkeyPatch, engine: EchoEngine
) -> None:
    engine.hold_after = 1
    llm = echo_llm(monkeypatch, engine)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, ["a", "b"])
        wait_until(lambda: len(engine.tasks) == 2)
        llm.close()
        with pytest.raises(Unavailable, match="closed"):
            call.result(10)
    assert not engine.tasks


def test_a_call_beside_the_closing_is_told_of_it(llm: LLM, engine: EchoEngine) -> None:
    engine.hold_after = 1
    loop = llm._thread._loop
    begin, closers = loop.call_soon_threadsafe, list[threading.Thread]()

    def close_first(work: Any) -> None:
        if not closers:
            closers.append(threading.Thread(target=llm.close))
            closers[0].start()
            closers[0].join(0.05)
        begin(work)

    loop.call_soon_threadsafe = close_first  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("a")
    closers[0].join(10)
    assert threads() == []


def test_who_is_collected_on_the_loops_own_thread_ends(llm: LLM) -> None:
    loop, errors = llm._thread._loop, list[Any]()
    loop.set_exception_handler(lambda _, error: errors.append(error))
    loop.call_soon_threadsafe(llm._finalizer)
    wait_until(lambda: threads() == [])
    assert not errors


def test_a_child_has_none(llm: LLM, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forked:
        own = os.getpid()
        forked.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(Unavailable, match="another"):
            llm.generate("a")
        llm._thread.close(lambda: pytest.fail("the parent's instances would end"))
    assert threads() == ["kunserve"]


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def launch(_: Any) -> Any:
        raise ConfigError("no memory")

    monkeypatch.setattr("kunserve_extras.offline.llm.launch", launch)
    with pytest.raises(ConfigError, match="no memory"):
        LLM("tiny")
    assert threads() == []


def test_state_and_tokenizer(llm: LLM) -> None:
    assert len(llm.state().instances) == 2
    assert llm.get_tokenizer() is tiny_tokenizer()
