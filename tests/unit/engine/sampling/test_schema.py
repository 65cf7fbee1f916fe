"""Schemas as the library takes them: closed where their writer did not say it, else as written."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kunserve.core.request import StructuredOutput
from kunserve.engine.sampling.structured.grammar import compile_form
from kunserve.engine.sampling.structured.schema import prepare_schema
from kunserve.engine.sampling.structured.vocabulary import open_vocabulary
from tests.examples import examples
from tests.tiny_models import VOCAB, save_tokenizer

WORD, NUMBER = {"type": "string"}, {"type": "integer"}
CITY: dict[str, Any] = {"type": "object", "properties": {"a": WORD}, "required": ["a"]}
DAYS: dict[str, Any] = {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    save_tokenizer(folder)
    return open_vocabulary((folder / "tokenizer.json").read_text(), VOCAB, [2])


def takes(vocabulary: LLTokenizer, schema: dict[str, Any], value: Any) -> bool:
    """Whether an answer may be this value, all of it."""
    matcher = compile_form(vocabulary, StructuredOutput("json_schema", json.dumps(schema)))
    tokens = vocabulary.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "value", "is_taken"),
    [
        (CITY, {"a": "x"}, True),
        (CITY, {"a": "x", "type": "function"}, False),
        (CITY | {"additionalProperties": True}, {"a": "x", "c": 1}, True),
        (CITY | {"additionalProperties": NUMBER}, {"a": "x", "c": "y"}, False),
        ({"type": "object", "properties": {}}, {}, True),
        ({"type": "object", "properties": {}}, {"a": 1}, False),
        ({"type": "object"}, {"a": 1}, True),
        ({"type": "object", "properties": {"in": CITY}}, {"in": {"a": "x", "c": 1}}, False),
        ({"type": "object", "properties": {"properties": WORD}}, {"properties": "x"}, True),
        ({"type": "array", "items": CITY}, [{"a": "x", "c": 1}], False),
        ({"anyOf": [CITY, DAYS]}, {"b": 1}, True),
        ({"anyOf": [CITY, DAYS]}, {"b": 1, "c": 1}, False),
        ({"$ref": "#/$defs/in", "$defs": {"in": CITY}}, {"a": "x", "c": 1}, False),
        ({"allOf": [CITY, DAYS]}, {"a": "x", "b": 1}, True),
        ({"allOf": [CITY]}, {"a": "x", "b": 1}, False),
        (
            {"allOf": [{"$ref": "#/$defs/in"}, DAYS], "$defs": {"in": CITY}},
            {"a": "x", "b": 1},
            True,
        ),
        (CITY | {"anyOf": [DAYS, {"required": ["c"]}]}, {"a": "x", "b": 1}, True),
        (CITY | {"required": ["a", "c"]}, {"a": "x", "c": 1}, True),
        (CITY | {"minProperties": 2}, {"a": "x", "c": 1}, True),
        ({"type": "object", "patternProperties": {"^x": WORD}}, {"xy": "z"}, True),
        ({"type": "object", "patternProperties": {"^x": WORD}}, {"y": 1}, False),
        (CITY | {"default": {"properties": {"a": 1}}}, {"a": "x"}, True),
        (WORD | {"format": "of the house"}, "x", True),
    ],
)
def test_an_object_has_what_its_schema_names(
    vocabulary: LLTokenizer, schema: dict[str, Any], value: Any, is_taken: bool
) -> None:
    assert takes(vocabulary, schema, value) is is_taken


_NAMES = st.sampled_from("abc")
_LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [WORD, NUMBER, {"type": "object"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {}]
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose parts are drawn from ``inner``."""
    several = st.lists(inner, min_size=1, max_size=2)
    keys: dict[str, st.SearchStrategy[Any]] = {
        "properties": st.dictionaries(_NAMES, inner, max_size=2),
        "patternProperties": st.fixed_dictionaries({"^x": inner}),
        "required": st.lists(_NAMES, unique=True, max_size=2),
        "allOf": several,
        "anyOf": several,
        "additionalProperties": st.booleans(),
        "minProperties": st.integers(0, 2),
    }
    return st.fixed_dictionaries({"type": st.just("object")}, optional=keys)


_SCHEMAS = st.recursive(_LEAVES, _around, max_leaves=8)


def _refusal(schema: Any) -> str:
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"coerce_one_of": True})
    return str(LLMatcher.validate_grammar(grammar))


@settings(max_examples=examples(150))
@given(_SCHEMAS, st.dictionaries(_NAMES, _SCHEMAS, min_size=3))
def test_no_schema_is_refused_that_was_taken_as_written(
    schema: dict[str, Any], definitions: dict[str, Any]
) -> None:
    written = {"allOf": [schema], "$defs": definitions}
    prepared = copy.deepcopy(written)
    prepare_schema(prepared)
    if not _refusal(written):
        assert not _refusal(prepared), prepared
