"""Libraries for structured outputs: time of a mask, and of compiling a schema.

    python -m benchmarks.structured_libraries [--rounds 3]

llguidance is installed with KunServe. xgrammar is measured too where it is installed (`pip install
--no-deps xgrammar apache-tvm-ffi`; what it asks for besides is triton, 286 MB). Each follows the
same documents token by token, in SmolLM2's vocabulary and in one of 151,000 tokens that is made
from it. A mask is computed, then the token is taken. Libraries take turns. Times are the
processor's.
"""

import argparse
import importlib
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from benchmarks.report import Report, Setting
from kunserve.model.source import resolve_model
from kunserve.model.vocabulary import tokenizer_json

EOS = 2
LARGE_VOCAB = 151_000
SLOW_S = 30.0
"""A schema that took a library longer is not asked of it again."""


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _optional(**properties: Any) -> dict[str, Any]:
    return _object(**properties) | {"required": []}


_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_MAYBE: dict[str, Any] = {"type": ["string", "null"]}
_NODE = _object(
    value={"type": "number"}, children={"type": "array", "items": {"$ref": "#/$defs/n"}}
)
DOCUMENTS: dict[str, tuple[dict[str, Any], Any]] = {
    "person": (
        _object(name=_TEXT, age=_INTEGER, email=_TEXT),
        {"name": "Johanna O'Brien the third", "age": 42, "email": "jo@example.com"},
    ),
    "orders": (
        _object(
            items={
                "type": "array",
                "items": _object(
                    sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    quantity=_INTEGER,
                    status={"enum": ["new", "shipped", "returned"]},
                ),
            }
        ),
        {"items": [{"sku": "ABC-1234", "quantity": i, "status": "shipped"} for i in range(6)]},
    ),
    "optional fields": (
        _optional(**{f"field_{i}": _MAYBE for i in range(60)}),
        {f"field_{i}": "some text here" for i in range(0, 60, 3)},
    ),
    "tree": (
        {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
        {"value": 1.5, "children": [{"value": 2.25, "children": []}, {"value": 4, "children": []}]},
    ),
    "formats": (
        _object(
            date={"type": "string", "format": "date-time"},
            id={"type": "string", "format": "uuid"},
            note={"type": "string", "maxLength": 200},
        ),
        {
            "date": "2025-01-02T03:04:05Z",
            "id": "123e4567-e89b-12d3-a456-426614174000",
            "note": "a somewhat longer text that goes on for a while and then ends",
        },
    ),
    "any object": ({"type": "object"}, {"text": "lorem ipsum dolor sit amet " * 4, "n": [1, 2]}),
    "union": (
        {
            "anyOf": [
                _object(
                    kind={"const": kind},
                    payload=_optional(**{f"{kind}_{i}": _TEXT for i in range(10)}),
                )
                for kind in ("alpha", "beta", "gamma", "delta")
            ]
        },
        {"kind": "gamma", "payload": {"gamma_1": "hello world", "gamma_5": "foo"}},
    ),
    "enums": (
        _object(**{f"p{i}": {"enum": [f"value {i} {j}" for j in range(100)]} for i in range(30)}),
        {f"p{i}": f"value {i} 42" for i in range(30)},
    ),
}


class Follower(Protocol):
    """One document in one library."""

    def mask(self) -> None:
        """Compute which tokens may come next."""

    def take(self, token_id: int) -> None:
        """Go on with a token."""


Open = Callable[[Tokenizer, int], Callable[[str], Follower]]
"""From a vocabulary to what compiles a schema."""


def open_llguidance(tokenizer: Tokenizer, vocab_size: int) -> Callable[[str], Follower]:
    """The library that was chosen."""
    vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=EOS)
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)

    class One:
        def __init__(self, schema: str) -> None:
            grammar = LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": "[ \\n]{0,20}"}
            )
            self._matcher = LLMatcher(vocabulary, grammar)
            if self._matcher.is_error():
                raise ValueError(self._matcher.get_error())

        def mask(self) -> None:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

        def take(self, token_id: int) -> None:
            assert self._matcher.consume_token(token_id)

    return One


def open_xgrammar(tokenizer: Tokenizer, vocab_size: int) -> Callable[[str], Follower]:
    """vLLM's first choice."""
    library: Any = importlib.import_module("xgrammar")
    names = [tokenizer.id_to_token(token) or "" for token in range(vocab_size)]
    kind = library.VocabType.BYTE_LEVEL
    info = library.TokenizerInfo(
        names, vocab_type=kind, vocab_size=vocab_size, stop_token_ids=[EOS]
    )
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    words = library.allocate_token_bitmask(1, vocab_size)

    class One:
        def __init__(self, schema: str) -> None:
            self._matcher = library.GrammarMatcher(compiler.compile_json_schema(schema))

        def mask(self) -> None:
            self._matcher.fill_next_token_bitmask(words)

        def take(self, token_id: int) -> None:
            assert self._matcher.accept_token(token_id)

    return One


LIBRARIES: dict[str, Open] = {
    "llguidance": open_llguidance,
    "xgrammar": open_xgrammar,
}


@dataclass
class Times:
    """Of one library in one vocabulary, in seconds."""

    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def follow(
    compile_schema: Callable[[str], Follower], name: str, tokens: list[int], to: Times
) -> None:
    """One document, from compiling its schema to its last token."""
    began_s = time.process_time()
    try:
        follower = compile_schema(json.dumps(DOCUMENTS[name][0]))
        to.compile_s.append(time.process_time() - began_s)
        for token in tokens:
            at_s = time.process_time()
            follower.mask()
            to.mask_s.append(time.process_time() - at_s)
            follower.take(token)
    except Exception as error:
        print(f"# {name}: {str(error)[:100]}")
        to.failed.add(name)
    if time.process_time() - began_s > SLOW_S:
        to.failed.add(name)


def enlarged(tokenizer: Tokenizer) -> Tokenizer:
    """With tokens made of two, up to ``LARGE_VOCAB``, as large vocabularies have longer ones."""
    parts = json.loads(tokenizer.to_str())
    vocabulary, merges = parts["model"]["vocab"], parts["model"]["merges"]
    draw = random.Random(0)
    short = [token for token in vocabulary if len(token) < 8]
    while len(vocabulary) < LARGE_VOCAB:
        first, second = draw.choice(short), draw.choice(short)
        if first + second not in vocabulary and "Ġ" not in second:
            vocabulary[first + second] = len(vocabulary)
            merges.append([first, second] if isinstance(merges[0], list) else f"{first} {second}")
    return Tokenizer.from_str(json.dumps(parts))


def main() -> None:
    """Every library that is installed, in both vocabularies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    small = Tokenizer.from_str(tokenizer_json(resolve_model("smollm2-135m")))
    here = {name: one for name, one in LIBRARIES.items() if importlib.util.find_spec(name)}
    with Report("structured_libraries", rounds=rounds) as report:
        for tokenizer in (small, enlarged(small)):
            vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
            opened = {name: one(tokenizer, vocab_size) for name, one in here.items()}
            times = {name: Times() for name in opened}
            for _ in range(rounds):
                for document, (_, value) in DOCUMENTS.items():
                    tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False).ids
                    for name, compile_schema in opened.items():
                        if document not in times[name].failed:
                            follow(compile_schema, document, tokens, times[name])
            for name, found in times.items():
                place: dict[str, Setting] = {"library": name, "vocabulary": vocab_size}
                masks = sorted(found.mask_s)
                report.add(
                    "compile median", statistics.median(found.compile_s) * 1e3, "ms", **place
                )
                report.add("compile worst", max(found.compile_s) * 1e3, "ms", **place)
                report.add("mask mean", statistics.mean(masks) * 1e6, "us", **place)
                report.add("mask median", statistics.median(masks) * 1e6, "us", **place)
                report.add("mask p99", masks[int(len(masks) * 0.99)] * 1e6, "us", **place)
                report.add("mask worst", masks[-1] * 1e6, "us", **place)
                report.add("failed", len(found.failed), "", **place)


if __name__ == "__main__":
    main()
