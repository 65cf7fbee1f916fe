"""Which form a body asks for, and the process that tries forms."""

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kunserve.core.errors import InvalidRequest, Overloaded
from kunserve.core.request import StructuredOutput
from kunserve.server.api.forms import checker as checker_module
from kunserve.server.api.forms import process as process_module
from kunserve.server.api.forms.body import AskedForm, form_of
from kunserve.server.api.forms.checker import FormChecker
from kunserve.server.api.forms.child import Order, Verdict
from kunserve.server.api.forms.metrics import ROWS, FormMetrics
from kunserve.server.api.forms.process import TOO_MUCH, FormProcess
from kunserve.server.api.schema import ChatBody
from kunserve.server.telemetry.metric_row import metrics_of
from kunserve.transport.children.child import START_S
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
SCHEMA_TEXT = json.dumps(SCHEMA)


def asked(**fields: Any) -> AskedForm | None:
    return form_of(ChatBody(messages=[], **fields))


def response_format(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        (response_format("text"), None),
        (response_format("json_object"), ("json_object", "")),
        (
            response_format("json_schema", json_schema={"name": "n", "schema": SCHEMA}),
            ("json_schema", SCHEMA_TEXT),
        ),
        (
            response_format(
                "json_schema", json_schema={"name": "n", "strict": False, "schema": SCHEMA}
            ),
            ("json_schema", SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": f" {SCHEMA_TEXT}\n"}}, ("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+", "json": None}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "start: \"a\""}}, ("grammar", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            ("json_schema", '{"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}'),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_way_to_ask(fields: dict[str, Any], form: tuple[str, str] | None) -> None:
    found = asked(**fields)
    if form is None:
        assert found is None
    else:
        assert found == AskedForm(next(iter(fields)), StructuredOutput(*form))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (response_format("xml"), "must be `text`, `json_object` or `json_schema` (got 'xml')"),
        ({"response_format": "json"}, "`response_format` must be an object with a `type`"),
        (response_format("json_schema"), "`response_format.json_schema` must be an object"),
        (response_format("json_schema", json_schema={"name": "n"}), "must be a JSON schema"),
        ({"structured_outputs": {}}, "needs exactly one of `json`, `regex`"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "needs exactly one"),
        ({"structured_outputs": {"jsom": {}}}, "`structured_outputs.jsom` is not a known field"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "is not supported by this server"),
        ({"structured_outputs": {"json_object": 1}}, "must be true or false"),
        ({"structured_outputs": {"choice": []}}, "must be a list of strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "must be a list of strings"),
        ({"structured_outputs": {"regex": ["a"]}}, "must be a string"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "need `json`"),
        (outputs(json="{"), "`structured_outputs.json` is not a JSON schema"),
        (outputs(json=[1]), "must be a JSON schema"),
        (outputs(json=True), "must be a JSON schema"),
        (outputs(json='{"minimum": NaN}'), "is not a JSON schema"),
        (outputs(json="[" * 100_000), "is not a JSON schema"),
        (outputs(regex="a" * 300_000), "`structured_outputs.regex` may have 262144 characters"),
        (outputs(json={"enum": [1] * 140_000}), "`structured_outputs.json` may have 262144"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 300_000}},
            "`structured_outputs.whitespace_pattern` may have 262144 characters",
        ),
        (
            response_format("json_object") | {"structured_outputs": {"regex": "a"}},
            "Only one of `response_format` and `structured_outputs`",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_form_is_said(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert says in str(caught.value) and caught.value.param in fields
    assert len(str(caught.value)) < 300
    assert str(caught.value).count("JSON schema") <= 1, "said once"


def order() -> Order:
    return Order(tiny_tokenizer().backend_tokenizer.to_str(), (0,), 300)


@pytest.fixture(scope="module")
def process() -> Iterator[FormProcess]:
    made = FormProcess(order)
    yield made
    made.close()


def schema(**fields: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(fields))


NESTED = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
OK = [
    StructuredOutput("json_object", ""),
    schema(**SCHEMA),
    schema(enum=[f"value {i}" for i in range(9000)]),
    StructuredOutput("choice", json.dumps([f"{i:010}" for i in range(9000)])),
    StructuredOutput("regex", "(a|b)*a(a|b){30}"),
    schema(type="string", format="nonsense"),
    schema(oneOf=[{"type": "integer"}, {"minimum": 5}]),
    StructuredOutput("grammar", 'root ::= "a" root | "b"'),
    schema(**{"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
]
REFUSED = [
    (StructuredOutput("regex", "(?=a)b"), "look-around"),
    (StructuredOutput("grammar", "start: nope"), "unknown name"),
    (StructuredOutput("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "recursion"),
    (StructuredOutput("json_schema", NESTED), "recursion"),
    (schema(type="object", properties={"a": False}, required=["a"]), "Unsatisfiable"),
    (schema(**{"$ref": "#"}), "no output can have this form"),
    (schema(**{"$ref": "http://127.0.0.1:1/x.json"}), "does not fetch"),
    (schema(**{"$ref": "file:///etc/passwd"}), "not present"),
    (schema(type="array", uniqueItems=True), "uniqueItems"),
    (StructuredOutput("regex", "a?" * 100_000), TOO_MUCH),
    (StructuredOutput("regex", "(a|aa)+" * 200), "too many expressions"),  # with its first token
    (StructuredOutput("regex", "(a|aa)+" * 200 + "|"), "too many expressions"),  # or its second
    # Minutes of the library's time, whatever its own limits.
    (schema(allOf=[{"type": "string", "pattern": f".*{c}.*{d}"} for c in "abcdefghij"
                   for d in "klmnop"]), TOO_MUCH),
]  # fmt: skip


def test_forms_are_tried_and_hostile_ones_refused_in_bounded_time(process: FormProcess) -> None:
    threads = threading.active_count()
    for form in OK:
        assert process.try_form(form).error is None, form.text[:60]
    for form, says in REFUSED:
        began_s = time.monotonic()
        verdict = process.try_form(form)
        assert verdict.error is not None and says in verdict.error, (form.text[:60], verdict)
        assert len(verdict.error) <= 500
        assert time.monotonic() - began_s < process_module.MAX_TRY_S + START_S
    assert process.try_form(OK[0]).error is None, "the next one gets a new process"
    assert threading.active_count() == threads


def test_a_process_without_an_answer_is_ended(
    process: FormProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.try_form(OK[0]).error is None
    first = process._process
    assert first is not None
    monkeypatch.setattr(process_module, "MAX_TRY_S", 0.001)
    with pytest.raises(Overloaded, match="cannot be compiled now"):
        process.try_form(REFUSED[-1][0])
    monkeypatch.undo()
    assert first.exit_code is not None and process._process is None
    assert process.try_form(OK[0]).error is None


def test_a_process_that_reads_nothing_is_ended(
    process: FormProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.try_form(OK[0]).error is None
    first = process._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr(process_module, "MAX_TRY_S", 0.1)
    with pytest.raises(Overloaded, match="cannot be compiled now"):
        process.try_form(StructuredOutput("regex", "a" * 200_000))
    assert first.exit_code is not None and process._process is None


def test_a_process_that_has_died_is_replaced(process: FormProcess) -> None:
    assert process.try_form(OK[0]).error is None
    assert process._process is not None
    os.kill(process._process.pid, 9)
    process._process.join()
    with pytest.raises(Overloaded):
        process.try_form(OK[0])
    assert process.try_form(OK[0]).error is None


class Scripted:
    """Stands in for the process: says no to what has an x, counts, and may be held."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def try_form(self, form: StructuredOutput) -> Verdict:
        assert self.gate.wait(20)
        self.tried.append(form.text)
        return Verdict("it has an x" if "x" in form.text else None, 0.01)

    def kill(self) -> None:
        self.gate.set()

    def close(self) -> None:
        self.gate.set()


@pytest.fixture
def scripted() -> Iterator[tuple[FormChecker, Scripted]]:
    checker, made = FormChecker(order, FormMetrics()), Scripted()
    checker._process = made  # type: ignore[assignment]
    yield checker, made
    made.gate.set()
    checker.close()


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


def test_each_form_is_tried_once(scripted: tuple[FormChecker, Scripted]) -> None:
    checker, process = scripted

    async def story() -> None:
        await asyncio.gather(*(checker.check(regex("a"), "p") for _ in range(3)))
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match="`structured_outputs` cannot be compiled: it has"
            ):
                await checker.check(regex("x"), "structured_outputs")
        await checker.check(regex("a"), "p")

    asyncio.run(story())
    assert process.tried == ["a", "x"]
    lines = {
        (sample.name, sample.labels.get("kind")): sample.value
        for metric in metrics_of(ROWS, checker._metrics, "m")
        for sample in metric.samples
    }
    assert lines["kunserve:structured_requests_total", "regex"] == 6
    assert lines["kunserve:structured_refused_total", "regex"] == 1
    assert lines["kunserve:structured_compile_seconds_count", None] == 2


def test_what_is_remembered_is_bounded(
    scripted: tuple[FormChecker, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_KNOWN", 2)
    monkeypatch.setattr(checker_module, "MAX_KNOWN_CHARS", 20)
    checker, process = scripted

    async def story() -> None:
        for text in ("a", "b", "a", "c", "a", "b", "b" * 18, "a"):
            await checker.check(regex(text), "p")

    asyncio.run(story())
    assert process.tried == ["a", "b", "c", "b", "b" * 18, "a"]


def test_too_many_at_once_are_told_so_and_a_client_may_leave(
    scripted: tuple[FormChecker, Scripted],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checker_module, "MAX_WAITING", 2)
    checker, process = scripted
    process.gate.clear()

    async def story() -> None:
        waiting = [asyncio.create_task(checker.check(regex(text), "p")) for text in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Too many"):
            await checker.check(regex("c"), "p")
        waiting[0].cancel()
        monkeypatch.setattr(checker_module, "MAX_WAIT_S", 0.01)
        with pytest.raises(Overloaded, match="wait too long"):
            await checker.check(regex("b"), "p")
        process.gate.set()
        await waiting[1]
        while checker._waiting:
            await asyncio.sleep(0.001)
        await checker.check(regex("a"), "p")

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert process.tried == ["a", "b"] and not caplog.records
